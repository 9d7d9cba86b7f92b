"""`toma generate`: one image with merged tokens, beside the same without if wanted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from PIL.Image import Image

    from toma_diffusion.generation import Drawing
    from toma_diffusion.hooks.summary import Summary


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
            "If not given, the defaults for this model."
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the noise that the image starts from.")] = 0,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    guidance: Annotated[
        float | None, typer.Option(help="Higher follows the prompt more closely; if not given, the pipeline's own.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels; if not given, the pipeline's own.")] = None,
    height: Annotated[int | None, typer.Option(help="In pixels; if not given, the pipeline's own.")] = None,
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
    from toma_diffusion.bench.scenario import Method
    from toma_diffusion.generation import Drawing, load_pipeline, write_png

    console = Console()
    try:
        if output.suffix != ".png":
            raise ValueError(f"output {str(output)!r} is not a PNG file: end it in .png, which can hold the settings.")
        drawing = Drawing(prompt, seed, steps, guidance, width, height, negative_prompt)
        method = Method.parse(preset) if preset else None
        changes = {} if ratio is None else {"ratio": ratio}
        pipe: Any = load_pipeline(model, device or None, dtype or None)
        handle = (
            apply_toma(pipe, **changes)
            if method is None
            else apply_toma(pipe, method.preset, **dict(method.overrides) | changes)
        )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error

    image, seconds = _draw(pipe, drawing, console, "drawing", warm_up=compare)
    summary = handle.summary()
    for line in _in_short(summary):
        console.print(line, highlight=False)
    console.print(f"{seconds:.2f} s with merging", highlight=False)
    settings = {
        "model": model,
        **asdict(drawing),
        "method": method.preset if method else "toma defaults",
        "config": summary.config.to_dict(),
        "seconds": round(seconds, 3),
        **_versions(pipe),
    }
    if compare:
        handle.enabled = False
        whole, whole_seconds = _draw(pipe, drawing, console, "drawing without merging", warm_up=True)
        psnr = _psnr(whole, image)
        told = f"{whole_seconds / seconds:.2f}× as fast, PSNR {psnr:.1f} dB"
        console.print(f"{whole_seconds:.2f} s without: {told}", highlight=False)
        settings |= {"unmerged_seconds": round(whole_seconds, 3), "psnr": str(round(psnr, 3))}
        image = _side_by_side(whole, whole_seconds, image, seconds, f"{summary.config.label}, {told}", summary)
    write_png(image, output, settings)
    console.print(f"Wrote {output}", soft_wrap=True, highlight=False)
