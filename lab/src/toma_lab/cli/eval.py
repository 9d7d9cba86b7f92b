"""`toma eval`: measure what skipped steps, merging, and other ways to save time do to images or clips."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import report_user_errors

if TYPE_CHECKING:
    from toma_lab.columns import Column

METHODS, RATIOS = "balanced,fast,toma-stage,tomesd", "0.25,0.5,0.75"
PAPER_STEPS, PAPER_STEPS_OF_FLUX = 50, 35


@report_user_errors
def evaluate_command(
    prompts: Annotated[
        str, typer.Option(help="A text file, one prompt per line; a CSV file with a column prompt; or imagenet.")
    ],
    model: options.Model = "bundled",
    template: Annotated[str, typer.Option(help="Text around every prompt: 'a photo of a {}'.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds for every prompt. Default: 0.")] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="As in toma bench: fast:computed=10,toma-stage:scale=inf,tomesd,tofu,todo. Fewer steps: steps:14. "
            "Caches: first-block-cache:threshold=0.1, taylorseer:cache_interval=3, magcache:threshold=0.06, and for "
            "UNets deepcache:interval=3. Together: toma-stage+steps:14. Default: " + METHODS
        ),
    ] = "",
    ratios: Annotated[str, typer.Option(help="Fractions of the tokens to remove. Default: " + RATIOS)] = "",
    paper: Annotated[
        str, typer.Option(help="Instead of methods and ratios: the rows of table2, 3, 6, 7, 9 or 10 of the paper.")
    ] = "",
    protocol: Annotated[
        str, typer.Option(help="paper: seeds 0,1,2 with all of imagenet (3,000 images), or with 50 prompts of a file.")
    ] = "",
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Default: 4 of bundled-4step; else {options.STEPS}, with --paper or --protocol the paper's 50, on "
            "Flux 35."
        ),
    ] = None,
    guidance: options.Guidance = None,
    size: options.Size = "",
    frames: options.Frames = None,
    fps: options.Fps = None,
    image: options.BeginsWith = None,
    batch: Annotated[
        int, typer.Option(help="Images in one call of the pipeline. Not for merging on Flux and the like.")
    ] = 1,
    time_of: Annotated[
        str,
        typer.Option(
            help="sdxl or flux: compute the gain in time from measured steps of that model. For a small one like it."
        ),
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            help="Some of mse,psnr,ssim,lpips,dino,clip_t,fid,kid, and of clips flicker. Default: all that there are."
        ),
    ] = "",
    lpips_weights: Annotated[Path | None, typer.Option(help="A .safetensors file.")] = None,
    inception_weights: Annotated[Path | None, typer.Option(help="A TorchScript file, for FID and KID.")] = None,
    real_images: Annotated[Path | None, typer.Option(help="A folder, for FID and KID.")] = None,
    dino: Annotated[str, typer.Option(help="A local folder or a hub id. Default: DINO ViT-S/16.")] = "",
    clip: Annotated[str, typer.Option(help="A local folder or a hub id. Default: CLIP ViT-B/32.")] = "",
    dtype: options.Dtype = "",
    device: options.Device = "",
    output: Annotated[Path, typer.Option(help="Folder of the run. The same command resumes it.")] = Path("eval"),
    commit: options.Commit = None,
) -> None:
    """Generate the same images or clips with the model as it is and in other ways, score them, and write one CSV row
    each.

    On several GPUs: accelerate launch -m toma_lab.cli eval ...
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from toma_diffusion.engine.install import find_denoisers
    from toma_lab.columns.ours import count_blocks
    from toma_lab.costs import StepCosts
    from toma_lab.evaluate import EvalFolder, EvalPlan, evaluate
    from toma_lab.facts import gather_facts
    from toma_lab.metrics import CLIP_METRICS, METRICS, Weights, check_names, open_metrics
    from toma_lab.metrics.features import CLIP, DINO
    from toma_lab.parsing import split_list
    from toma_lab.table import to_rich

    where, state, console = options.open_state(device)
    chosen_prompts, chosen_seeds = _items(prompts, template, seeds, protocol)
    check_names(split_list(metrics))
    if time_of:
        StepCosts.load(time_of)  # raises if there are none
    as_paper = bool(paper or protocol)
    opened = options.open_model(
        model,
        where,
        dtype,
        options.Pictures(steps, guidance, size, frames, fps, image),
        usual_steps=PAPER_STEPS if as_paper else options.STEPS,
        steps_by_class={"Flux": PAPER_STEPS_OF_FLUX} if as_paper else {},
    )
    usual_metrics = [name for name in METRICS if opened.clips or name not in CLIP_METRICS]
    chosen_metrics = tuple(split_list(metrics) or usual_metrics)
    weights = Weights(lpips_weights, inception_weights, real_images, dino or DINO, clip or CLIP)
    scores = open_metrics(chosen_metrics, weights, where, clips=opened.clips)
    columns, left_out = _columns(opened.pipe, methods, ratios, paper)
    options.print_lines(console, left_out, "Left out: ")
    denoiser = find_denoisers(opened.pipe)[0]
    for column in columns:
        if batch > 1 and column.mixes_images(denoiser):
            raise UsageError(
                f"--batch {batch} would change the images of {column.title!r} on a {type(denoiser).__name__}: what it "
                "does to one depends on the others. Use --batch 1."
            )
    plan = EvalPlan(
        **opened.asked,
        prompts=chosen_prompts,
        seeds=chosen_seeds,
        columns=tuple(columns),
        metrics=chosen_metrics,
        batch=batch,
        blocks=count_blocks(denoiser),
        time_of=time_of,
        paper=paper,
    )
    with state.main_process_first():
        folder = EvalFolder.start(output, plan, gather_facts(where, commit))
    with folder.locked(is_first=state.is_main_process):
        options.print_lines(console, scores.missing, "Left out: ")
        known = len(scores.missing)
        bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*bars, console=console, transient=True) as progress:
            evaluate(folder, opened.pipe, scores, state, progress, image)
    options.print_lines(console, scores.missing[known:], "Left out: ")
    console.print(to_rich(folder))
    options.print_lines(console, [f"Wrote {output}"])
    failed = [row for row in folder.rows if row.get("failure")]
    if failed:
        options.print_lines(console, [f"{len(failed)} images failed; the same command tries them again."])
        raise typer.Exit(1)


def _items(source: str, template: str, seeds: str, protocol: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Prompts and seeds."""
    from toma_lab.parsing import numbers
    from toma_lab.prompts import load_prompts, paper_protocol

    prompts = load_prompts(source, template)
    if not protocol:
        return prompts, tuple(numbers("seed", seeds, int)) or (0,)
    if protocol != "paper":
        raise UsageError(f"protocol {protocol!r} is not known: use 'paper', or leave it out.")
    if seeds:
        raise UsageError(f"--protocol paper sets the seeds: leave --seeds {seeds} out.")
    return paper_protocol(source, prompts)


def _columns(pipe: Any, methods: str, ratios: str, paper: str) -> tuple[list[Column], list[str]]:
    """The baseline, the noise floor, and the requested methods; and why others that were asked for are left out."""
    from toma_diffusion.engine.install import find_denoisers
    from toma_lab.columns import UNCHANGED, ColumnSpec, columns_of
    from toma_lab.columns.paper import paper_columns
    from toma_lab.parsing import numbers, split_list

    if paper:
        if methods or ratios:
            raise UsageError(f"--paper {paper} sets methods and ratios: leave --methods and --ratios out.")
        columns, left_out = paper_columns(find_denoisers(pipe)[0], paper)
        return [*UNCHANGED, *columns], left_out
    specs = [ColumnSpec.parse(text) for text in split_list(methods or METHODS)]
    wanted = numbers("ratio", ratios or RATIOS, float)
    left_out = [reason for spec in specs for reason in spec.impossible(wanted)] if ratios else []
    return [*UNCHANGED, *columns_of(pipe, specs, wanted)], left_out
