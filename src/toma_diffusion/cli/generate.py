"""`toma generate`: one image with merged tokens, beside the same without if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.cli.options import find_device, mistakes_told

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console

    from toma_diffusion.generation import Drawing
    from toma_diffusion.hooks.handle import ToMAHandle
    from toma_diffusion.hooks.summary import Summary


@mistakes_told("metrics,report")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Annotated[
        str, typer.Option(help="bundled, a folder with a diffusers pipeline, a .safetensors file, or a hub id.")
    ] = "bundled",
    ratio: Annotated[
        float | None, typer.Option(help="Share of the tokens to remove; if not given, the preset's own.")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="A preset of ToMA, with changes if wanted (fast:num_regions=256;scope=block), or tomesd, tofu, todo. "
            "If not given, balanced."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the noise that the image starts from.")] = 0,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    guidance: Annotated[
        float | None, typer.Option(help="Higher follows the prompt more closely; if not given, the pipeline's own.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels, with --height; else the pipeline's own.")] = None,
    height: Annotated[int | None, typer.Option(help="In pixels, with --width; else the pipeline's own.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Write a side-by-side: without merging, with merging.")
    ] = False,
    output: Annotated[Path, typer.Option(help="The PNG file to write; its metadata holds all settings.")] = Path(
        "toma.png"
    ),
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32; if not given, the model's usual.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; if not given, a GPU if there is one.")] = "",
) -> None:
    """Draw one image with merged tokens, say what was merged and how long it took, and write it with its settings."""
    from dataclasses import asdict

    from rich.console import Console

    from toma_diffusion import apply_toma
    from toma_diffusion.api import DEFAULT_PRESET
    from toma_diffusion.bench.scenario import Method
    from toma_diffusion.checkpoints import load_pipeline
    from toma_diffusion.files import check_writable
    from toma_diffusion.generation import Drawing, write_png

    console = Console(markup=False)
    if output.suffix != ".png":
        raise ValueError(f"output {str(output)!r} is not a PNG file: end it in .png, which can hold the settings.")
    if compare:
        _check_installed("matplotlib", "torchmetrics")
    drawing = Drawing(prompt, seed, steps, guidance, width, height, negative_prompt)
    method = Method.parse(preset) if preset else None
    changes: dict[str, Any] = {} if ratio is None else {"ratio": ratio}
    pipe: Any = load_pipeline(model, str(find_device(device)), dtype or None)
    handle = (
        apply_toma(pipe, **changes)
        if method is None
        else apply_toma(pipe, method.preset, **dict(method.overrides) | changes)
    )
    check_writable(output)

    if compare:
        _warm_up(pipe, handle, drawing)
    image, seconds = _draw(pipe, drawing, console, "drawing")
    summary = handle.summary()
    for line in _in_short(summary):
        console.print(line, highlight=False)
    settings: dict[str, Any] = {
        "model": model,
        **asdict(drawing),
        "method": preset or DEFAULT_PRESET,
        "config": summary.config.to_dict(),
        "seconds": round(seconds, 3),
        "device": str(pipe.device),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        **_versions(),
    }
    if compare:
        from toma_diffusion.metrics.base import Sample
        from toma_diffusion.metrics.pixels import Psnr
        from toma_diffusion.report.sheet import make_sheet

        handle.enabled = False
        whole, whole_seconds = _draw(pipe, drawing, console, "drawing without merging")
        psnr = Psnr().score(Sample(image.convert("RGB"), prompt, whole.convert("RGB")))
        console.print(f"{whole_seconds:.2f} s without merging", highlight=False)
        told = f"{seconds:.2f} s, {whole_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
        settings |= {"unmerged_seconds": round(whole_seconds, 3), "psnr": f"{psnr:.3f}"}
        captions = [f"without merging: {whole_seconds:.2f} s", f"{_title(summary)}: {told}"]
        image = make_sheet([whole, image], captions, columns=2)
    else:
        told = f"{seconds:.2f} s"
    console.print(f"{told} with merging", highlight=False)
    write_png(image, output, settings)
    console.print(f"Wrote {output}", soft_wrap=True, highlight=False)


def _check_installed(*packages: str) -> None:
    from importlib.util import find_spec

    for package in packages:
        if find_spec(package) is None:
            raise ValueError(f"--compare needs {package}: pip install 'toma-diffusion[metrics,report]'.")


def _warm_up(pipe: Any, handle: ToMAHandle, drawing: Drawing) -> None:
    """One step of each kind, so that neither is timed with what only ever happens once."""
    from dataclasses import replace

    from toma_diffusion.generation import draw

    for enabled in (False, True):
        handle.enabled = enabled
        draw(pipe, replace(drawing, steps=1))


def _draw(pipe: Any, drawing: Drawing, console: Console, what: str) -> tuple[Image, float]:
    """The image, and the seconds of the pipeline's call."""
    from time import perf_counter

    from rich.progress import Progress

    from toma_diffusion.generation import draw

    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(what, total=drawing.steps)
        start = perf_counter()
        image = draw(pipe, drawing, lambda step: progress.advance(bar))  # an image is on the CPU: nothing is pending
        return image, perf_counter() - start


def _title(summary: Summary) -> str:
    return f"{summary.config.label}, ratio {summary.config.ratio:g}"


def _in_short(summary: Summary) -> list[str]:
    lines = [
        f"{_title(summary)}, {kind.kind}: {kind.tokens_before} → {kind.tokens_after} tokens ({kind.regions}) "
        f"in {kind.blocks} blocks"
        for kind in summary.kinds
    ]
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
