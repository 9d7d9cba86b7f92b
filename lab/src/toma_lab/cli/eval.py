"""`toma eval`: measure what merging, and other ways to save time, do to images or clips."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    from rich.console import Console

    from toma_lab.evaluation import Variant

METHODS, RATIOS, STEPS = "balanced,fast,toma-stage,tomesd", "0.25,0.5,0.75", 20
PAPER_STEPS, PAPER_STEPS_OF_FLUX = 50, 35


@report_user_errors
def evaluate_command(
    prompts: Annotated[
        str, typer.Option(help="A text file, one prompt per line; a CSV file with a column prompt; or imagenet.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="bundled, bundled-4step, bundled-flux, bundled-video (clips), a folder, a .safetensors file, a hub id."
        ),
    ] = "bundled",
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
            help=f"Default: 4 of bundled-4step; else {STEPS}, with --paper or --protocol the paper's 50, on Flux 35."
        ),
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance scale. Default: that of the pipeline; of bundled-4step 1: none.")
    ] = None,
    size: Annotated[str, typer.Option(help="In pixels: 1024 or 1024x768. Default: that of the pipeline.")] = "",
    frames: Annotated[int | None, typer.Option(help="Of a clip. Default: those of the pipeline.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second of a clip. Default: those of the model.")] = None,
    image: Annotated[Path | None, typer.Option(help="What all clips of an image-to-video pipeline begin with.")] = None,
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
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32. Default: the usual one of the model.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")] = "",
    output: Annotated[Path, typer.Option(help="Folder of the run. The same command resumes it.")] = Path("eval"),
    commit: Annotated[str | None, typer.Option(help="Commit to record. Default: that of the checkout.")] = None,
) -> None:
    """Generate the same images or clips without and with merging, fewer steps or caches, score them, and write one
    CSV row each.

    On several GPUs: accelerate launch -m toma_lab.cli eval ...
    """
    from accelerate import PartialState
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from toma_diffusion.api import find_denoiser
    from toma_lab.evaluation import Plan, RunFolder
    from toma_lab.evaluation.run import evaluate
    from toma_lab.evaluation.table import notes_of, to_rich
    from toma_lab.evaluation.variants import count_blocks, mixes_images
    from toma_lab.experiments.costs import StepCosts
    from toma_lab.experiments.facts import gather_facts
    from toma_lab.experiments.parsing import Resolution, split_list
    from toma_lab.metrics import CLIP_METRICS, METRICS, Weights, check_names, open_metrics
    from toma_lab.metrics.base import describe_file
    from toma_lab.metrics.features import CLIP, DINO
    from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.clips import ClipRequest, check_request
    from toma_lab.pipelines.generation import makes_clips

    where = find_device(device)
    # Processes wait for each other only between phases, which may be long.
    state = PartialState(cpu=where.type == "cpu", timeout=timedelta(days=1))
    where = state.device if state.num_processes > 1 else where
    console = Console(markup=False, quiet=not state.is_main_process)
    chosen_prompts, chosen_seeds = _items(prompts, template, seeds, protocol)
    resolution = Resolution.parse(size, 8) if size else None
    check_names(split_list(metrics))
    weights = Weights(lpips_weights, inception_weights, real_images, dino or DINO, clip or CLIP)
    pipe = load_pipeline(model, str(where), dtype or None)
    clips = makes_clips(pipe)
    if clips or (frames, fps, image) != (None, None, None):
        check_request(pipe, ClipRequest("", frames=frames, fps=fps, image=image))
    usual_metrics = [name for name in METRICS if clips or name not in CLIP_METRICS]
    chosen_metrics = tuple(split_list(metrics) or usual_metrics)
    opened = open_metrics(chosen_metrics, weights, where, clips=clips)
    denoiser = find_denoiser(pipe)
    if time_of:
        StepCosts.load(time_of)  # raises if there are none
    variants = _variants(pipe, methods, ratios, paper, console)
    for variant in variants:
        if batch > 1 and mixes_images(denoiser, variant):
            raise UsageError(
                f"--batch {batch} would change the images of {variant.title!r} on a {type(denoiser).__name__}: what it "
                "does to one depends on the others. Use --batch 1."
            )
    usual_steps = _usual_steps(denoiser, as_paper=bool(paper or protocol))
    steps, guidance = steps_and_guidance(model, steps, guidance, usual_steps)
    plan = Plan(
        model=public_name(model),
        prompts=chosen_prompts,
        seeds=chosen_seeds,
        variants=tuple(variants),
        metrics=chosen_metrics,
        steps=steps,
        guidance=guidance,
        width=resolution.width if resolution else None,
        height=resolution.height if resolution else None,
        batch=batch,
        clips=clips,
        frames=frames,
        fps=fps,
        image="" if image is None else describe_file(image),
        dtype=str(pipe.dtype).removeprefix("torch."),
        weights=fingerprint(pipe),
        blocks=count_blocks(denoiser),
        time_of=time_of,
        paper=paper,
    )
    with state.main_process_first():
        folder = RunFolder.start(output, plan, gather_facts(where, commit))
    _print_left_out(console, opened.missing)
    known = len(opened.missing)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        evaluate(folder, pipe, opened, state, progress, image)
    _print_left_out(console, opened.missing[known:])
    console.print(to_rich(folder))
    for note in notes_of(folder):
        console.print(note, highlight=False, soft_wrap=True)
    console.print(f"Wrote {output}", soft_wrap=True, highlight=False)


def _print_left_out(console: Console, reasons: Iterable[str]) -> None:
    for reason in reasons:
        console.print(f"Left out: {reason}", highlight=False, soft_wrap=True)


def _items(source: str, template: str, seeds: str, protocol: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Prompts and seeds."""
    from toma_lab.evaluation.prompts import load_prompts, paper_protocol
    from toma_lab.experiments.parsing import numbers

    prompts = load_prompts(source, template)
    if not protocol:
        return prompts, tuple(numbers("seed", seeds, int)) or (0,)
    if protocol != "paper":
        raise UsageError(f"protocol {protocol!r} is not known: use 'paper', or leave it out.")
    if seeds:
        raise UsageError(f"--protocol paper sets the seeds: leave --seeds {seeds} out.")
    return paper_protocol(source, prompts)


def _variants(pipe: Any, methods: str, ratios: str, paper: str, console: Console) -> list[Variant]:
    """The baseline, the noise floor, and the requested methods."""
    from toma_diffusion.api import find_denoiser
    from toma_lab.evaluation.variants import UNMERGED, VariantSpec, paper_variants, variants_of
    from toma_lab.experiments.parsing import numbers, split_list

    if not paper:
        parsed = [VariantSpec.parse(text) for text in split_list(methods or METHODS)]
        wanted = numbers("ratio", ratios or RATIOS, float)
        left_out = [reason for spec in parsed for reason in spec.impossible(wanted)]
        variants = variants_of(pipe, parsed, wanted)
    elif methods or ratios:
        raise UsageError(f"--paper {paper} sets methods and ratios: leave --methods and --ratios out.")
    else:
        variants, left_out = paper_variants(find_denoiser(pipe), paper)
    _print_left_out(console, left_out)
    return [*UNMERGED, *variants]


def _usual_steps(denoiser: Any, *, as_paper: bool) -> int:
    if not as_paper:
        return STEPS
    return PAPER_STEPS_OF_FLUX if type(denoiser).__name__.startswith("Flux") else PAPER_STEPS
