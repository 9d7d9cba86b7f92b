"""`toma demo`: compare presets, merging and fewer steps on the demo model, with nothing to download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    from toma_lab.evaluate import EvalFolder

PROMPTS = (
    "3d emoji of a red apple",
    "3d emoji of smiling face with sunglasses",
    "a photo of blue pants",
    "a photo of a t-shirt",
)
"""The demo model was trained on emoji and photographs of clothes."""
SEEDS = (0,)
GUIDANCE = 4.0
"""As the model card recommends."""
METHODS = ("balanced", "fast", "toma-stage")
"""With the baseline and four prompts these are, with fewer steps, 20 images: about 90 seconds on two CPU cores."""
FEWER = 1.43
"""How many times fewer steps are taken in one row, to compare the others with: 14 in place of 20."""
METRICS = ("mse", "psnr", "ssim", "lpips")
"""LPIPS only if its weights are given, in this run or a later one."""
GRID = "grid.png"


@report_user_errors
def demo(
    output: Annotated[Path, typer.Option(help="Folder to write to. A run that is already there is resumed.")] = Path(
        "demo"
    ),
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    lpips_weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file with the weights of LPIPS, to measure it too.")
    ] = None,
    device: options.Device = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the run in the folder and start again.")] = False,
) -> None:
    """Generate a few images with the model as it is and in faster ways, and compare speed and quality."""
    from accelerate import PartialState
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from toma_lab.columns import BASELINE, Column, ColumnSpec, columns_of
    from toma_lab.evaluate import EvalFolder, EvalPlan, evaluate
    from toma_lab.facts import gather_facts
    from toma_lab.metrics import Weights, open_metrics
    from toma_lab.pipelines.checkpoints import BUNDLED, fingerprint, load_pipeline
    from toma_lab.report.page import write_report
    from toma_lab.table import to_rich

    console = Console(markup=False)
    pipe: Any = load_pipeline(BUNDLED, str(find_device(device)))
    fewer = [f"steps:{round(steps / FEWER)}"] if steps > 1 else []
    plan = EvalPlan(
        model=BUNDLED,
        prompts=PROMPTS,
        seeds=SEEDS,
        columns=(Column(BASELINE), *columns_of(pipe, map(ColumnSpec.parse, [*METHODS, *fewer]), (0.5,))),
        metrics=METRICS,
        steps=steps,
        guidance=GUIDANCE,
        dtype=str(pipe.dtype).removeprefix("torch."),
        weights=fingerprint(pipe),
    )
    if fresh:
        _clear(output)
    folder = EvalFolder.start(output, plan, gather_facts(pipe.device))
    possible = [name for name in METRICS if name != "lpips" or lpips_weights]
    metrics = open_metrics(possible, Weights(lpips=lpips_weights), pipe.device)
    options.print_lines(console, metrics.missing)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with folder.locked(), Progress(*columns, console=console, transient=True) as progress:
        evaluate(folder, pipe, metrics, PartialState(cpu=pipe.device.type == "cpu"), progress)
        bar = progress.add_task("generating the merge map", total=steps)
        _write_merge_map(folder, pipe, lambda: progress.advance(bar))
    grid, page = _write_grid(folder), write_report(folder)
    console.print(to_rich(folder))
    options.print_lines(console, _what_to_look_at(grid, page))


def _what_to_look_at(grid: Path, page: Path) -> list[str]:
    return [
        f"Open {page} in a browser: table, plots, and a slider to compare each image with the baseline. "
        f"{grid} shows all images at once.",
        "Columns: method, and fraction of tokens removed if it merges; s = seconds per image; speed-up = baseline time "
        "/ method time, median over the images; the others = distance to the baseline's image (↑ higher is closer, ↓ "
        "lower).",
        "balanced is the default of speed_up(pipe): it computes 12 of 20 steps, and predicts the model's "
        "output in the others. fast computes 8. toma-stage merges tokens. The last row takes fewer steps and changes "
        "nothing else.",
        "This model is small: merging tokens saves more time on large models such as SDXL and Flux. The paper's "
        "results suggest that it also loses less there. See docs/speed.md and docs/quality.md.",
    ]


def _clear(output: Path) -> None:
    """Delete the files of a run, and nothing else in its folder."""
    import shutil

    if not (output / "run.json").exists():
        return
    shutil.rmtree(output / "images", ignore_errors=True)
    for name in ("rows.jsonl", "table.csv", "run.json"):  # run.json last: without it the folder does not count as a run
        (output / name).unlink(missing_ok=True)


def _write_merge_map(folder: EvalFolder, pipe: Any, advance: Callable[[], object]) -> None:
    """Generate the first image again with ToMA, and plot what merges into what."""
    from toma_lab.inspection.merge_map import MergeMapRecorder, plot_merge_maps
    from toma_lab.pipelines.generation import generate_image
    from toma_lab.report.page import MERGE_MAP

    plan, item = folder.plan, folder.plan.items[0]
    column = next(each for each in plan.columns if each.name == "toma-stage")  # it merges in every step
    with column.applied(pipe, plan.steps) as handle:
        recorder = MergeMapRecorder(handle)

        def on_step(step: int) -> None:
            recorder(step)
            advance()

        image = generate_image(pipe, plan.request(item, plan.steps), on_step)
    plot_merge_maps(image, recorder.maps, f"{item.prompt}: {column.title}").savefig(folder.path / MERGE_MAP, dpi=130)


def _write_grid(folder: EvalFolder) -> Path:
    """Write all images on one sheet: a row per prompt, a column per method."""
    from PIL import Image

    from toma_lab.pipelines.generation import write_png
    from toma_lab.report.pictures import make_sheet
    from toma_lab.rows import number

    columns = folder.plan.columns
    images, captions = [], []
    for item in folder.plan.items:
        for column in columns:
            images.append(Image.open(folder.picture(column, item)).convert("RGB"))
            row = folder.item_row(column, item)
            psnr, seconds = number(row, "psnr"), number(row, "seconds")
            detail = item.prompt if psnr is None else f"PSNR {psnr:.1f} dB"
            captions.append(f"{column.title}\n{seconds:.1f} s, {detail}")
    path = folder.path / GRID
    write_png(make_sheet(images, captions, len(columns)), path, folder.plan.to_dict())
    return path
