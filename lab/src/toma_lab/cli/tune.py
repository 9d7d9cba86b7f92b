"""`toma tune`: find the fastest setting of a model on this machine within a limit of quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import report_user_errors

if TYPE_CHECKING:
    from rich.table import Table

    from toma_lab.tune.outcome import Outcome
    from toma_lab.tune.plan import TunePlan

METRICS = ("psnr", "lpips")
METRICS_OF_CLIPS = (*METRICS, "flicker")
COMPILE = ("none", "blocks", "whole", "graphs")


@report_user_errors
def tune_command(
    model: options.Model = "bundled",
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
        int | None, typer.Option(help=f"Denoising steps of the original. Default: {options.STEPS}; of bundled-4step 4.")
    ] = None,
    guidance: options.Guidance = None,
    size: options.Size = "",
    frames: options.Frames = None,
    fps: options.Fps = None,
    image: options.BeginsWith = None,
    prompts: options.Prompts = "",
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
    dtype: options.Dtype = "",
    device: options.Device = "",
    output: Annotated[Path, typer.Option(help="Folder of the search. The same command resumes it.")] = Path("tune"),
    commit: options.Commit = None,
) -> None:
    """Measure skipped steps, merging, caches and fewer steps on this model and machine. Writes the best as tuned.json.

    The model may generate images or clips. Clips take long: the command first says how many there are, about.

    On several GPUs: accelerate launch -m toma_lab.cli tune ...
    """
    from functools import partial

    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from toma_lab.facts import gather_facts
    from toma_lab.metrics import Weights, open_metrics
    from toma_lab.parsing import split_list
    from toma_lab.prompts import built_in_prompts, load_prompts
    from toma_lab.report.tune_page import write_search
    from toma_lab.tune.folder import TuneFolder
    from toma_lab.tune.goal import Goal
    from toma_lab.tune.plan import TunePlan, class_of_denoisers, find_budget
    from toma_lab.tune.run import tune

    find_budget(budget)
    if compile not in COMPILE:
        raise UsageError(f"--compile {compile!r} is not known: use one of {', '.join(COMPILE)}.")
    where, state, console = options.open_state(device)
    wish = partial(Goal.of, quality=quality, max_lpips=max_lpips, min_psnr=min_psnr, speed_up=speed_up)
    wish()  # raises, before a model is loaded, for what cannot be wanted
    chosen = load_prompts(prompts) if prompts else ()
    opened = options.open_model(
        model,
        where,
        dtype,
        options.Pictures(steps, guidance, size, frames, fps, image),
    )
    names = METRICS_OF_CLIPS if opened.clips else METRICS
    metrics = open_metrics(names, Weights(lpips=lpips_weights), where, clips=opened.clips)
    goal = wish(without_lpips=" ".join(metrics.missing))
    plan = TunePlan(
        **opened.asked,
        model_class=class_of_denoisers(opened.pipe),
        prompts=chosen or built_in_prompts(model, clips=opened.clips),
        budget=budget,
        compile=compile,
        methods=tuple(split_list(methods)),
        lpips=metrics.source_of("lpips"),
    )
    with state.main_process_first():
        folder = TuneFolder.start(output, plan, gather_facts(where, commit))
    options.print_lines(console, [*([goal.note] if goal.note else metrics.missing), *_about_clips(plan)], "Note: ")
    times = (TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with folder.locked(is_first=state.is_main_process):
        with Progress(
            TextColumn("{task.description}"), BarColumn(), *times, console=console, transient=True
        ) as progress:
            outcome = tune(folder, opened.pipe, metrics, goal, state, progress, image)
        if not state.is_main_process:
            return
        page = write_search(folder, outcome)
    console.print(_table(outcome))
    options.print_lines(console, [outcome.sentence, f"Wrote {folder.tuned_path} and {page}."])
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
            result.column.title,
            f"{figures.speed_up:.2f}",
            *([] if figures.lpips is None else [f"{figures.lpips:.3f}"]),
            f"{figures.psnr:.2f}",
            *([] if figures.flicker is None else [f"{figures.flicker:.2f}"]),
            "chosen" if outcome.chosen is result else "",
        )
    return table
