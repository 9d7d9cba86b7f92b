"""`toma generate --config tuned.json`: one image or clip with a setting that `toma tune` found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toma_diffusion.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from toma_diffusion.tuned import Tuned
    from toma_lab.cli.generated import Generated
    from toma_lab.pipelines.generation import ImageRequest

Generate = Callable[[Any, "ImageRequest", "Console", str], "tuple[Generated, float]"]


def check_options(tuned: Tuned, preset: str, ratio: float | None, steps: int | None) -> None:
    """Raise for options that contradict the file."""
    if preset or ratio is not None:
        given = f"--preset {preset}" if preset else f"--ratio {ratio:g}"
        raise UsageError(f"--config sets the method and all its settings: leave {given} out.")
    if steps is not None:
        tuned.check_steps(steps)


def generate_tuned(
    tuned: Tuned, pipe: Any, request: ImageRequest, console: Console, generate: Generate, path: Path, *, compare: bool
) -> dict[Path, tuple[Generated, dict[str, Any]]]:
    """The files to write, with the settings to note in each: the image or clip, or both side by side. Prints what is
    done and how long it took.

    Args:
        request: as it would be without the setting, with all steps.
        generate: generates an image or clip with the pipeline as it is, and returns it with its seconds.
        path: of the image or clip. Other files of a comparison have names like it.
    """
    from toma_diffusion.api import find_denoisers
    from toma_lab.cli import generated
    from toma_lab.evaluation.run import applied, fitted, warm_up
    from toma_lab.pipelines.clips import settings_of
    from toma_lab.tune.setting import from_file, in_sentences

    for model in find_denoisers(pipe):
        tuned.check_model(model)
    found = from_file(tuned)
    for shortcut in found.shortcuts:
        shortcut.check_on(pipe)
    own = replace(request, steps=found.requested_steps(tuned.num_steps))
    variant = fitted(pipe, found, own, tuned.num_steps)
    for sentence in in_sentences(variant, tuned.num_steps):
        console.print(sentence, highlight=False, soft_wrap=True)
    with applied(pipe, variant, tuned.num_steps):
        if compare:
            warm_up(pipe, [own])
        made, seconds = generate(pipe, own, console, "generating")
    for line in [*generated.describe(pipe, made), *_other_size(tuned, made)]:
        console.print(line, highlight=False, soft_wrap=True)
    settings: dict[str, Any] = {**settings_of(own), "variant": variant.to_dict(), "seconds": round(seconds, 3)}
    if not compare:
        console.print(f"{seconds:.2f} s", highlight=False)
        return {path: (made, settings)}

    original, original_seconds = generate(pipe, request, console, "generating without it")
    psnr = generated.psnr_of(made, original, request.prompt)
    result = f"{seconds:.2f} s, {original_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
    console.print(f"{original_seconds:.2f} s without it\n{result} with it", highlight=False)
    both = settings | {"original_seconds": round(original_seconds, 3), "psnr": f"{psnr:.3f}"}
    captions = [f"original: {original_seconds:.2f} s", f"{variant.title}: {result}"]
    of_original = {**settings_of(request), "variant": None, "seconds": round(original_seconds, 3)}
    return generated.compared(path, (original, of_original), (made, settings), captions, both)


def _other_size(tuned: Tuned, made: Generated) -> list[str]:
    """A note if a clip is not like those that the setting was measured on: its speed and quality may differ."""
    from toma_diffusion.tuned import ClipSize
    from toma_lab.pipelines.clips import Clip

    if not isinstance(made, Clip) or tuned.clip in (None, ClipSize(len(made.frames), *made.size)):
        return []
    return [f"note: the setting was measured on clips of {tuned.clip}"]
