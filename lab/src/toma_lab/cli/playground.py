"""`toma playground`: a local page to try settings on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors


@report_user_errors
def playground(
    model: Annotated[
        str,
        typer.Option(
            help="bundled (with the other demo models of images), a folder with a diffusers pipeline, a .safetensors "
            "file or a hub id."
        ),
    ] = "bundled",
    port: Annotated[int, typer.Option(help="The page is at http://127.0.0.1:PORT, for this machine only.")] = 7860,
    lpips_weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file. Without it, PSNR and SSIM are shown, and no LPIPS.")
    ] = None,
    dtype: options.Dtype = "",
    device: options.Device = "",
    output: Annotated[Path, typer.Option(help="Folder for all files: pictures that are shown, and searches.")] = Path(
        "playground"
    ),
) -> None:
    """Open a page on this machine: the original and an accelerated picture, their times and distance, and toma tune."""
    from toma_lab.playground.own_folder import keep_files_in

    keep_files_in(output)
    import gradio  # noqa: F401 - if it is not installed, that is said before a model is loaded

    from toma_lab.metrics import Weights
    from toma_lab.pipelines.generation import makes_clips
    from toma_lab.playground.models import Models
    from toma_lab.playground.server import serve

    models = Models(model, find_device(device), dtype or None, Weights(lpips=lpips_weights))
    pipe = models.pipe(model)  # a model that cannot be loaded is said now
    if makes_clips(pipe):
        raise UsageError(
            f"model {model!r} is a {type(pipe).__name__}, which generates clips: the playground takes pipelines of "
            "images. Use toma generate --compare."
        )
    page, address = serve(models, output, port)
    typer.echo(f"Open {address} in a browser. Stop with Ctrl+C. Files are in {output}.")
    page.block_thread()
