"""`toma bench`: measure how much faster merging makes a denoiser on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    import torch

    from toma_lab.bench.pipelines import EndToEnd
    from toma_lab.bench.zoo import Denoiser

SIZES = ("auto", "real", "small")
RATIOS = "0.25,0.5,0.75"


@report_user_errors
def bench(
    model: Annotated[
        str,
        typer.Option(
            help="Random weights: sdxl, sd15, sd35, flux, flux2, flux2-klein, flux2-klein-4b, flux3, qwen-image, "
            "qwen-image-21, z-image, krea2, chroma, auraflow; of clips wan, wan-480p, wan-ti2v-5b, ltx2, h3, "
            "hunyuan15. Or bundled, bundled-4step, bundled-flux, bundled-video (clips), a folder, a file, a hub id."
        ),
    ] = "sdxl",
    size: Annotated[str, typer.Option(help="real or small. auto: real on a GPU, small on a CPU.")] = "auto",
    methods: Annotated[
        str,
        typer.Option(
            help="Presets or methods, each with optional settings: balanced,fast:computed=10,toma:scale=inf,tomesd. "
            "Fewer steps, and diffusers' caches: steps:14,first-block-cache:0.1,taylorseer:3."
        ),
    ] = "balanced,fast,toma,toma-tile,toma-once,toma-stage",
    ratios: Annotated[str, typer.Option(help=f"Fractions of the tokens to remove. Default: {RATIOS}.")] = "",
    resolution: Annotated[str, typer.Option(help="In pixels: 1024 or 1024x768. A list is allowed.")] = "",
    frames: Annotated[int | None, typer.Option(help="Of a clip. Default: those of the model, 81 of wan.")] = None,
    batch: Annotated[str, typer.Option(help="Batch size of a call, with guidance. A list is allowed.")] = "",
    modes: Annotated[
        str, typer.Option(help="eager, compiled, graph (CUDA graphs). Default: all on a GPU, eager on a CPU.")
    ] = "",
    compile: Annotated[str, typer.Option(help="block, whole, graphs (whole, as CUDA graphs), or none.")] = "block",
    steps: Annotated[int, typer.Option(help="Denoiser calls in a run.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs; the median counts.")] = 5,
    bounds: Annotated[
        str, typer.Option(help="Also time the lower-bound and floor of each method; or one of them, or none.")
    ] = "lower-bound,floor",
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Also time the text encoders and the decoder.")] = False,
    cache: Annotated[float | None, typer.Option(help="Threshold of diffusers' FirstBlockCache.")] = None,
    dtype: options.Dtype = "",
    device: options.Device = "",
    output: Annotated[Path, typer.Option(help="CSV file to append to. Its rows are not measured again.")] = Path(
        "bench.csv"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Overwrite the file.")] = False,
    take_turns: Annotated[
        Path | None,
        typer.Option(help="Lock file that benchmarks on one GPU share: all compile at once, one at a time is timed."),
    ] = None,
    commit: options.Commit = None,
) -> None:
    """Time a denoiser as it is and with each method, in the same mode, and write one CSV row per measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from toma_diffusion.checks import check_integer
    from toma_diffusion.files import check_writable
    from toma_lab.bench.group import Group, with_bounds
    from toma_lab.bench.pipelines import check_surroundings
    from toma_lab.bench.runner import Runner
    from toma_lab.bench.tables import table_of
    from toma_lab.bench.turns import Turns
    from toma_lab.bench.zoo import MODELS
    from toma_lab.columns import ColumnSpec
    from toma_lab.facts import gather_facts
    from toma_lab.folder import locked
    from toma_lab.parsing import Resolution, numbers, split_list
    from toma_lab.rows import Rows

    console = Console()
    where = find_device(device)
    if pipeline and model in MODELS:
        check_surroundings(model)
    denoiser, make_parts = _open(model, size, dtype, where)
    asked_ratios = tuple(numbers("ratio", ratios or RATIOS, float))
    specs = [ColumnSpec.parse(text) for text in split_list(methods)]
    asked_bounds = [name for name in split_list(bounds) if name != "none"]
    timed = with_bounds(denoiser.model, specs, asked_ratios, asked_bounds)
    check_integer("repeats", repeats, minimum=1)
    is_cached = cache is not None or any(column.is_cached for column in timed)
    timed_modes = _modes(split_list(modes), where, compile, is_cached)
    default_size = "x".join(map(str, denoiser.default_size[:2]))
    groups = [
        Group(
            model=denoiser.name,
            resolution=Resolution.parse(each_size, denoiser.family.multiple),
            batch=each_batch,
            mode=mode,
            compile=compile,
            steps=steps,
            dtype=str(denoiser.dtype).removeprefix("torch."),
            cache=cache,
            frames=denoiser.frames_of(frames),
        )
        for each_size in split_list(resolution) or [default_size]
        for each_batch in numbers("batch", batch, int) or [denoiser.default_batch]
        for mode in timed_modes
    ]
    for column in timed:
        for group in groups:
            group.check(column)
    if cache is not None and not hasattr(denoiser.model, "enable_cache"):
        raise UsageError(f"--cache {cache:g}: a {type(denoiser.model).__name__} has no block cache; transformers do.")
    for spec in specs if ratios else ():  # nobody asked for the default ones
        for reason in spec.impossible(asked_ratios):
            console.print(f"Left out: {reason}", highlight=False, soft_wrap=True)
    check_writable(output)
    if take_turns is not None:
        check_writable(take_turns)
        if take_turns.resolve() == output.resolve():
            raise UsageError(f"--take-turns and --output are both {str(output)!r}: give each a file of its own.")

    facts = gather_facts(where, commit)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lock = output.with_name(f".{output.name}.lock")
    with locked(lock, f"another benchmark is writing {str(output)!r}"), Turns(take_turns) as turns:
        rows = Rows(output, fresh=fresh)
        with Progress(*columns, console=console, transient=True) as progress:
            parts = make_parts if pipeline else None
            runner = Runner(groups, denoiser, timed, repeats, rows, facts, parts, progress, turns)
            runner.run()
    for group in groups:
        if table := table_of(group, rows, facts):
            console.print(table)
    console.print(f"Wrote {output}", soft_wrap=True, markup=False, highlight=False)
    if runner.failures:
        console.print(f"{runner.failures} measurements failed; the same command tries them again.", highlight=False)
        raise typer.Exit(1)


def _modes(names: list[str], device: torch.device, compile: str, is_cached: bool) -> tuple[str, ...]:
    if not names:  # everything that the device and the other options allow
        on_gpu = device.type == "cuda"
        captures = on_gpu and not is_cached and compile != "graphs"
        allowed = {"eager": True, "compiled": on_gpu and compile != "none", "graph": captures}
        return tuple(mode for mode, is_allowed in allowed.items() if is_allowed)
    if "graph" in names and device.type == "cpu":
        refusal = "mode 'graph' needs a GPU: CUDA graphs do not exist on a CPU"
        names = [name for name in names if name != "graph"]
        if not names:
            raise UsageError(f"{refusal}.")
        typer.echo(f"{refusal}. The other modes are measured.")
    return tuple(names)


def _open(name: str, size: str, dtype: str, device: torch.device) -> tuple[Denoiser, Callable[[], EndToEnd]]:
    """The denoiser, and a function that builds the rest of its pipeline."""
    from toma_lab.bench.pipelines import LoadedPipeline, RandomPipeline
    from toma_lab.bench.zoo import MODELS, build, load
    from toma_lab.pipelines.checkpoints import DTYPES

    if size not in SIZES:
        raise UsageError(f"size {size!r} is not known: use one of {', '.join(SIZES)}.")
    if dtype and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    chosen = DTYPES[dtype] if dtype else None
    if name not in MODELS:
        loaded = load(name, device=device, dtype=chosen)
        return loaded, lambda: LoadedPipeline(loaded)
    small = size == "small" or (size == "auto" and device.type == "cpu")
    denoiser = build(name, small=small, device=device, dtype=chosen)
    return denoiser, lambda: RandomPipeline(name, denoiser, small=small)
