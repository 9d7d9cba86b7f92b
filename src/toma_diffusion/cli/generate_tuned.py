"""`toma generate --config tuned.json`: one image with a setting that `toma tune` found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from toma_diffusion.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from toma_diffusion.pipelines.generation import ImageRequest
    from toma_diffusion.tuned import Tuned

Generate = Callable[[Any, "ImageRequest", "Console", str], "tuple[Image, float]"]


def check_options(tuned: Tuned, preset: str, ratio: float | None, steps: int | None) -> None:
    """Raise for options that contradict the file."""
    if preset or ratio is not None:
        given = f"--preset {preset}" if preset else f"--ratio {ratio:g}"
        raise UsageError(f"--config sets the method and all its settings: leave {given} out.")
    if steps is not None:
        tuned.check_steps(steps)


def generate_tuned(
    tuned: Tuned, pipe: Any, request: ImageRequest, console: Console, generate: Generate, *, compare: bool
) -> tuple[Image, dict[str, Any]]:
    """The image, or both side by side, and the settings to note in it. Prints what is done and how long it took.

    Args:
        request: as it would be without the setting, with all steps.
        generate: generates an image with the pipeline as it is, and returns it with its seconds.
    """
    from toma_diffusion.api import find_denoiser
    from toma_diffusion.evaluation.run import applied, fitted, warm_up
    from toma_diffusion.tune.setting import from_file, in_sentences

    tuned.check_model(find_denoiser(pipe))
    own = replace(request, steps=tuned.steps_left)
    variant = fitted(pipe, from_file(tuned), own)
    for sentence in in_sentences(variant, tuned.num_steps):
        console.print(sentence, highlight=False, soft_wrap=True)
    with applied(pipe, variant, tuned.num_steps):
        if compare:
            warm_up(pipe, [own])
        image, seconds = generate(pipe, own, console, "generating")
    settings: dict[str, Any] = {**asdict(own), "variant": variant.to_dict(), "seconds": round(seconds, 3)}
    if not compare:
        console.print(f"{seconds:.2f} s", highlight=False)
        return image, settings

    from toma_diffusion.metrics.base import Sample
    from toma_diffusion.metrics.pixels import Psnr
    from toma_diffusion.report.sheet import make_sheet

    original, original_seconds = generate(pipe, request, console, "generating without it")
    psnr = Psnr().score(Sample(image.convert("RGB"), request.prompt, original.convert("RGB")))
    result = f"{seconds:.2f} s, {original_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
    console.print(f"{original_seconds:.2f} s without it\n{result} with it", highlight=False)
    settings |= {"original_seconds": round(original_seconds, 3), "psnr": f"{psnr:.3f}"}
    captions = [f"original: {original_seconds:.2f} s", f"{variant.title}: {result}"]
    return make_sheet([original, image], captions, columns=2), settings
