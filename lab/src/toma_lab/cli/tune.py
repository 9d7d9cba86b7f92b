"""`toma tune`: find the fastest setting of a model on this machine within a limit of quality."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from toma_lab.tune.outcome import Outcome
    from toma_lab.tune.plan import TunePlan

STEPS = 20
METRICS = ("psnr", "lpips")
METRICS_OF_CLIPS = (*METRICS, "flicker")
COMPILE = ("none", "blocks", "whole", "graphs")


@report_user_errors
def tune_command(
    model: Annotated[
        str,
        typer.Option(
            help="bundled, bundled-4step, bundled-flux, bundled-video (clips), a folder, a .safetensors file, a hub id."
        ),
    ] = "bundled",
    quality: Annotated[
        str, typer.Option(help="lossless (LPIPS up to 0.01), high (0.05) or medium (0.15). Default: high.")
    ] = "",
    max_lpips: Annotated[float | None, typer.Option(help="The largest distance to the original images.")] = None,
    min_psnr: Annotated[float | None, typer.Option(help="The lowest PSNR to the original images, in dB.")] = None,
    speed_up: Annotated[
        float | None, typer.Option(help="In place of a limit: the nearest setting that is so many times as fast.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="How much is measured: small, medium or large. Of clips small has two prompts.")
    ] = "small",
    steps: Annotated[
        int | None, typer.Option(help=f"Denoising steps of the original. Default: {STEPS}; of bundled-4step 4.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance scale. Default: that of the pipeline; of bundled-4step 1: none.")
    ] = None,
    size: Annotated[str, typer.Option(help="In pixels: 1024 or 1024x768. Default: that of the pipeline.")] = "",
    frames: Annotated[int | None, typer.Option(help="Of a clip. Default: those of the pipeline.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second of a clip. Default: those of the model.")] = None,
    image: Annotated[Path | None, typer.Option(help="What all clips of an image-to-video pipeline begin with.")] = None,
    prompts: Annotated[
        str, typer.Option(help="A text file, one prompt per line, or a CSV file with a column prompt. Default: ours.")
    ] = "",
    methods: Annotated[
        str,
        typer.Option(
            help="Own candidates, written as for toma eval, with the ratio of merging after an @ and steps as a number "
            "or a share: toma-stage:skip_blocks=(0,1)@0.25,fast:computed=10,steps:70%. Default: those of the budget."
        ),
    ] = "",
    compile: Annotated[
        str, typer.Option(help="Compile every candidate: blocks, whole or graphs. Takes much longer. Default: none.")
    ] = "none",
    lpips_weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file. Without it, PSNR is used in place of LPIPS.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32. Default: the usual one of the model.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")] = "",
    output: Annotated[Path, typer.Option(help="Folder of the search. The same command resumes it.")] = Path("tune"),
    commit: Annotated[str | None, typer.Option(help="Commit to record. Default: that of the checkout.")] = None,
) -> None:
    """Measure skipped steps, merging, caches and fewer steps on this model and machine. Writes the best as tuned.json.

    The model may generate images or clips. Clips take long: the command first says how long, about.

    On several GPUs: accelerate launch -m toma_lab.cli tune ...
    """
    from functools import partial

    from accelerate import PartialState
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from toma_lab.evaluation.prompts import load_prompts
    from toma_lab.experiments.facts import gather_facts
    from toma_lab.experiments.parsing import Resolution, split_list
    from toma_lab.metrics import Weights, open_metrics
    from toma_lab.metrics.base import describe_file
    from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.clips import ClipRequest, check_request
    from toma_lab.pipelines.generation import makes_clips
    from toma_lab.report.tune_page import write_search
    from toma_lab.tune.budget import find_budget
    from toma_lab.tune.folder import TuneFolder
    from toma_lab.tune.goal import Goal
    from toma_lab.tune.plan import TunePlan, class_of_denoisers
    from toma_lab.tune.prompts import built_in_prompts
    from toma_lab.tune.run import tune

    find_budget(budget)
    if compile not in COMPILE:
        raise UsageError(f"--compile {compile!r} is not known: use one of {', '.join(COMPILE)}.")
    where = find_device(device)
    # Processes wait for each other only between stages, which may be long.
    state = PartialState(cpu=where.type == "cpu", timeout=timedelta(days=1))
    where = state.device if state.num_processes > 1 else where
    console = Console(markup=False, quiet=not state.is_main_process)
    wish = partial(Goal.of, quality=quality, max_lpips=max_lpips, min_psnr=min_psnr, speed_up=speed_up)
    wish()  # raises, before a model is loaded, for what cannot be wanted
    chosen_prompts = load_prompts(prompts) if prompts else ()
    resolution = Resolution.parse(size, 8) if size else None
    steps, guidance = steps_and_guidance(model, steps, guidance, STEPS)
    pipe = load_pipeline(model, str(where), dtype or None)
    clips = makes_clips(pipe)
    if clips or (frames, fps, image) != (None, None, None):
        check_request(pipe, ClipRequest("", frames=frames, fps=fps, image=image))
    metrics = open_metrics(METRICS_OF_CLIPS if clips else METRICS, Weights(lpips=lpips_weights), where, clips=clips)
    goal = wish(without_lpips=" ".join(metrics.missing))
    plan = TunePlan(
        model=public_name(model),
        model_class=class_of_denoisers(pipe),
        prompts=chosen_prompts or built_in_prompts(model, clips=clips),
        steps=steps,
        guidance=guidance,
        width=resolution.width if resolution else None,
        height=resolution.height if resolution else None,
        clips=clips,
        frames=frames,
        fps=fps,
        image="" if image is None else describe_file(image),
        dtype=str(pipe.dtype).removeprefix("torch."),
        weights=fingerprint(pipe),
        budget=budget,
        compile=compile,
        methods=tuple(split_list(methods)),
        lpips=metrics.source_of("lpips"),
    )
    with state.main_process_first():
        folder = TuneFolder.start(output, plan, gather_facts(where, commit))
    for note in [*([goal.note] if goal.note else metrics.missing), *_about_clips(plan)]:
        console.print(f"Note: {note}", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    # Other processes of the same launch share the folder: only the first holds the lock.
    with folder.locked() if state.is_main_process else nullcontext():
        with Progress(
            *columns, TextColumn("left:"), TimeRemainingColumn(), console=console, transient=True
        ) as progress:
            outcome = tune(folder, pipe, metrics, goal, state, progress, image)
        if not state.is_main_process:
            return
        page = write_search(folder, outcome)
    console.print(_table(outcome))
    for line in (outcome.sentence, f"Wrote {folder.tuned_path} and {page}."):
        console.print(line, highlight=False, soft_wrap=True)
    if not outcome.is_reached:
        raise typer.Exit(1)


def _about_clips(plan: TunePlan) -> list[str]:
    """What a search for clips does less of than one for images."""
    if not plan.clips:
        return []
    searched, final = len(plan.items), len(plan.final_items)
    few = " So few clips say little: --budget medium measures more." if plan.budget == "small" else ""
    return [
        f"budget {plan.budget} of clips: the search measures up to {searched} of each candidate, and up to "
        f"{plan.size.finalists} finalists on {final} more.{few}"
    ]


def _table(outcome: Outcome) -> Table:
    """The finalists, the fastest first."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"Finalists for “{outcome.goal}”", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("setting", overflow="fold")
    has_lpips = any(result.figures and result.figures.lpips is not None for result in outcome.finalists)
    has_flicker = any(result.figures and result.figures.flicker is not None for result in outcome.finalists)
    more = ["flicker ↓"] if has_flicker else []
    for heading in ("speed-up", *(["LPIPS ↓"] if has_lpips else []), "PSNR ↑", *more, ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in outcome.finalists:
        figures = result.figures
        assert figures is not None
        table.add_row(
            result.variant.title,
            f"{figures.speed_up:.2f}",
            *([] if figures.lpips is None else [f"{figures.lpips:.3f}"]),
            f"{figures.psnr:.2f}",
            *([] if figures.flicker is None else [f"{figures.flicker:.2f}"]),
            "chosen" if outcome.chosen is result else "",
        )
    return table
