"""`toma generate`: one image or clip from the faster model, or a comparison with the original."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    from rich.console import Console
    from toma_diffusion.engine.summary import Summary

    from toma_diffusion.handle import ToMAHandle
    from toma_lab.cli.generated import Generated
    from toma_lab.pipelines.generation import ImageRequest

STEPS = 20


@report_user_errors("metrics,report")
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    model: Annotated[
        str,
        typer.Option(
            help="bundled, bundled-4step, bundled-flux, bundled-video (clips), a folder with a diffusers pipeline, a "
            ".safetensors file or a hub id."
        ),
    ] = "bundled",
    ratio: Annotated[
        float | None, typer.Option(help="Fraction of the tokens to remove. Default: that of the preset.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="A preset, with optional settings (fast:computed=10, or toma-stage:num_regions=256), or tomesd, tofu, "
            "todo. Default: balanced."
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="In place of preset and ratio: a file tuned.json that toma tune wrote.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial noise.")] = 0,
    steps: Annotated[int | None, typer.Option(help=f"Denoising steps. Default: {STEPS}; of bundled-4step 4.")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance scale. Default: that of the pipeline; of bundled-4step 1: none.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What the image should not show.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels, with --height. Default: that of the pipeline.")] = None,
    height: Annotated[int | None, typer.Option(help="In pixels, with --width. Default: that of the pipeline.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a clip. Default: those of the pipeline.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second of a clip. Default: those of the model.")] = None,
    image: Annotated[Path | None, typer.Option(help="What an image-to-video pipeline begins with.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Write the original and the faster one side by side.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: toma.png, or of a clip toma.mp4. Its metadata holds all settings; those of a clip "
            "are in toma.mp4.json too."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32. Default: the usual one of the model.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")] = "",
) -> None:
    """Generate one image or clip faster, print what was skipped and merged and how long it took, and save it as PNG or
    mp4."""
    from rich.console import Console

    from toma_diffusion import apply_toma
    from toma_diffusion.api import DEFAULT_PRESET
    from toma_diffusion.files import check_writable
    from toma_diffusion.tuned import Tuned
    from toma_lab.cli import generated
    from toma_lab.cli.generate_tuned import check_options, generate_tuned
    from toma_lab.experiments.cells import MethodSpec
    from toma_lab.pipelines.checkpoints import load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.clips import settings_of
    from toma_lab.pipelines.generation import ImageRequest, makes_clips

    console = Console(markup=False)
    generated.check_ending(output)
    if compare:
        _check_installed("matplotlib", "torchmetrics")
    tuned = None if config is None else Tuned.read(config)
    if tuned is not None:
        check_options(tuned, preset, ratio, steps)
        steps = tuned.num_steps
    request = ImageRequest(
        prompt, seed, *steps_and_guidance(model, steps, guidance, STEPS), width, height, negative_prompt
    )
    method = MethodSpec.parse(preset) if preset else None
    changes: dict[str, Any] = {} if ratio is None else {"ratio": ratio}
    pipe: Any = load_pipeline(model, str(find_device(device)), dtype or None)
    request = generated.request_of(pipe, request, frames, fps, image)
    path = generated.output_of(pipe, output)
    about: dict[str, Any] = {
        "model": public_name(model),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        **_versions(),
    }
    if tuned is not None:
        tuned.check_thing(pipe, makes_clips=makes_clips(pipe))
        check_writable(path)
        files = generate_tuned(tuned, pipe, request, console, _generate, path, compare=compare)
        _write(console, {each: (made, about | noted) for each, (made, noted) in files.items()})
        return
    handle = (
        apply_toma(pipe, **changes)
        if method is None
        else apply_toma(pipe, method.preset, **dict(method.overrides) | changes)
    )
    check_writable(path)

    if compare:
        _warm_up(pipe, handle, request)
    made, seconds = _generate(pipe, request, console, "generating")
    summary = handle.summary()
    for line in [*generated.describe(pipe, made), *_in_short(summary)]:
        console.print(line, highlight=False)
    settings = {
        **about,
        **settings_of(request),
        "method": preset or DEFAULT_PRESET,
        "config": summary.config.to_dict(),
        "seconds": round(seconds, 3),
    }
    files = {path: (made, settings)}
    if compare:
        handle.enabled = False
        original, original_seconds = _generate(pipe, request, console, "generating the original")
        psnr = generated.psnr_of(made, original, prompt)
        console.print(f"{original_seconds:.2f} s as it is", highlight=False)
        result = f"{seconds:.2f} s, {original_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
        both = settings | {"original_seconds": round(original_seconds, 3), "psnr": f"{psnr:.3f}"}
        captions = [f"original: {original_seconds:.2f} s", f"{_title(summary)}: {result}"]
        of_original = settings | {"method": None, "config": None, "seconds": round(original_seconds, 3)}
        files = generated.compared(path, (original, of_original), (made, settings), captions, both)
    else:
        result = f"{seconds:.2f} s"
    console.print(f"{result} with {_title(summary)}", highlight=False)
    _write(console, files)


def _write(console: Console, files: dict[Path, tuple[Generated, dict[str, Any]]]) -> None:
    from toma_lab.cli import generated

    for path, (made, settings) in files.items():
        written = generated.write(made, path, settings)
        console.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True, highlight=False)


def _check_installed(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise UsageError(f"--compare needs {package}: pip install 'toma-diffusion[metrics,report]'.")


def _warm_up(pipe: Any, handle: ToMAHandle, request: ImageRequest) -> None:
    """Generate without and with acceleration, so that neither time includes what happens only once."""
    from toma_lab.evaluation.run import warm_up

    for enabled in (False, True):
        handle.enabled = enabled
        warm_up(pipe, [request])


def _generate(pipe: Any, request: ImageRequest, console: Console, what: str) -> tuple[Any, float]:
    """The image or clip, and how many seconds the pipeline took."""
    from time import perf_counter

    from rich.progress import Progress

    from toma_lab.pipelines.clips import generate as generate_all

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(what, total=request.steps)
        start = perf_counter()
        # The image is on the CPU when it returns, so that no GPU work is pending.
        (made,) = generate_all(pipe, [request], lambda step: progress.advance(bar))
        return made, perf_counter() - start


def _title(summary: Summary) -> str:
    config, (computed, predicted) = summary.config, summary.steps
    merging = f"{config.label}, ratio {config.ratio:g}"
    if not predicted:
        return merging
    skipped = f"{predicted} of {computed + predicted} steps skipped"
    return f"{merging}, {skipped}" if _merged(summary) else skipped


def _merged(summary: Summary) -> bool:
    return any(kind.tokens_before is not None for kind in summary.kinds)


def _in_short(summary: Summary) -> list[str]:
    lines = [
        f"{summary.config.label}, ratio {summary.config.ratio:g}, {kind.kind}: {kind.tokens_before} → "
        f"{kind.tokens_after} tokens ({kind.regions}) in {kind.blocks} blocks"
        for kind in summary.kinds
        if kind.tokens_before is not None
    ]
    if summary.steps[1]:
        lines += summary.skip[:2]
    if not _merged(summary):
        return lines + [f"note: {note}" for note in summary.notes]
    start, end = summary.config.window
    if (start, end) != (0, 1):
        lines.append(f"merged from {start:.0%} to {end:.0%} of the steps")
    if summary.left_alone:
        lines.append(f"{len(summary.left_alone)} blocks left alone: {summary.left_alone[0][1]}")
    return lines + [f"note: {note}" for note in summary.notes]


def _versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    from toma_diffusion import __version__

    return {"toma_diffusion": __version__, "torch": torch.__version__, "diffusers": metadata.version("diffusers")}
