"""`toma bench`: how fast merging makes a denoiser, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toma_diffusion.cli.options import find_device, numbers

if TYPE_CHECKING:
    import torch

    from toma_diffusion.bench.models import Denoiser
    from toma_diffusion.bench.pipelines import EndToEnd

SIZES = ("auto", "real", "small")


def bench(
    model: Annotated[
        str, typer.Option(help="sdxl, sd15, flux or sd35 with random weights; or bundled, a folder, file or hub id.")
    ] = "sdxl",
    size: Annotated[str, typer.Option(help="real or small; auto is real on a GPU and small on a CPU.")] = "auto",
    methods: Annotated[
        str,
        typer.Option(
            help="Presets, each with changes if wanted: toma,fast:num_regions=256;scale=inf; or tomesd, tofu, todo."
        ),
    ] = "toma,toma-tile,toma-once,fast",
    ratios: Annotated[str, typer.Option(help="Shares of the tokens to remove.")] = "0.25,0.5,0.75",
    scopes: Annotated[str, typer.Option(help="module, block, stage: instead of the methods' own.")] = "",
    resolution: Annotated[str, typer.Option(help="In pixels: 1024, or 1024x768 for width × height; several.")] = "",
    batch: Annotated[str, typer.Option(help="Of one call, both halves of guidance included; several.")] = "",
    modes: Annotated[
        str, typer.Option(help="eager, compiled, graph (CUDA graphs). If not given, all on a GPU and eager on a CPU.")
    ] = "",
    compile: Annotated[str, typer.Option(help="block, whole, or none (then graph replays eager kernels).")] = "block",
    steps: Annotated[int, typer.Option(help="Denoiser calls of a run.")] = 20,
    repeats: Annotated[int, typer.Option(help="Runs to take the median of.")] = 5,
    bounds: Annotated[
        str, typer.Option(help="Time each method's lower-bound and floor too, or only one of them, or none.")
    ] = "lower-bound,floor",
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Time text encoders and decoder around it too.")] = False,
    cache: Annotated[float | None, typer.Option(help="Threshold of diffusers' first-block cache.")] = None,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32; if not given, the model's usual.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; if not given, a GPU if there is one.")] = "",
    output: Annotated[Path, typer.Option(help="CSV file to append to; what it holds is not measured again.")] = Path(
        "bench.csv"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start the file over.")] = False,
    take_turns: Annotated[
        Path | None,
        typer.Option(help="File by which benchmarks on one GPU compile side by side and time one at a time."),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to note, if not that of the checkout.")] = None,
) -> None:
    """Time a denoiser with and without merging, both in the same mode, and write one CSV row a measurement."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from toma_diffusion.bench.records import Records, claimed, gather_facts
    from toma_diffusion.bench.runner import Runner
    from toma_diffusion.bench.scenario import Method, Resolution, Scenario, compare, split_list
    from toma_diffusion.bench.tables import table_of
    from toma_diffusion.bench.turns import Turns

    console = Console()
    try:
        where = find_device(device)
        parsed_methods = tuple(Method.parse(text) for text in split_list(methods))
        parsed_modes = _modes(split_list(modes), where, compile, cache)
        denoiser, make_parts = _open(model, size, dtype, where)
        scenario = Scenario(
            methods=parsed_methods,
            ratios=tuple(numbers("ratio", ratios, float)),
            scopes=tuple(split_list(scopes)),
            resolutions=tuple(
                Resolution.parse(text, denoiser.family.multiple)
                for text in split_list(resolution) or [str(denoiser.default_resolution)]
            ),
            batches=tuple(numbers("batch", batch, int)) or (denoiser.default_batch,),
            modes=parsed_modes,
            compile=compile,
            steps=steps,
            repeats=repeats,
            bounds=tuple(name for name in split_list(bounds) if name != "none"),
            pipeline=pipeline,
            cache=cache,
        )
        if cache is not None and not hasattr(denoiser.model, "enable_cache"):
            raise ValueError(
                f"--cache {cache:g}: a {type(denoiser.model).__name__} has no block cache; transformers do."
            )
        comparisons = compare(
            denoiser.model, scenario.methods, scenario.ratios, scenario.scopes, bounds=scenario.bounds
        )
        for method in scenario.methods:
            for ratio in set(scenario.ratios) - set(method.possible(scenario.ratios)):
                console.print(f"Left out: {method.preset} cannot have ratio {ratio:g}.", highlight=False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    files = ExitStack()
    try:
        if take_turns is not None and take_turns.resolve() == output.resolve():
            raise ValueError(f"--take-turns and --output are both {str(output)!r}: give each a file of its own.")
        files.enter_context(claimed(output))
        records = Records(output, fresh=fresh)
        turns = files.enter_context(Turns(take_turns))
    except (ValueError, OSError) as error:
        files.close()
        raise typer.BadParameter(str(error)) from error

    facts = gather_facts(where, commit)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with files, Progress(*columns, console=console, transient=True) as progress:
        parts = make_parts if pipeline else None
        runner = Runner(scenario, denoiser, comparisons, records, facts, parts, progress, turns)
        runner.run()
    for group in runner.groups:
        if table := table_of(group, records, facts):
            console.print(table)
    console.print(f"Wrote {output}", soft_wrap=True, markup=False, highlight=False)
    if runner.failures:
        console.print(f"{runner.failures} measurements failed; the same command tries them again.", highlight=False)
        raise typer.Exit(1)


def _modes(names: list[str], device: torch.device, compile: str, cache: float | None) -> tuple[str, ...]:
    if not names:  # all that the other options and the device allow
        on_gpu = device.type == "cuda"
        allowed = {"eager": True, "compiled": on_gpu and compile != "none", "graph": on_gpu and cache is None}
        return tuple(mode for mode, is_allowed in allowed.items() if is_allowed)
    if "graph" in names and device.type == "cpu":
        refusal = "mode 'graph' needs a GPU: a CPU has no CUDA graphs"
        names = [name for name in names if name != "graph"]
        if not names:
            raise ValueError(f"{refusal}.")
        typer.echo(f"{refusal}; the other modes go on.")
    return tuple(names)


def _open(name: str, size: str, dtype: str, device: torch.device) -> tuple[Denoiser, Callable[[], EndToEnd]]:
    """The denoiser, and how to build what stands around it."""
    from toma_diffusion.bench.models import MODELS, build, load
    from toma_diffusion.bench.pipelines import LoadedParts, RandomParts
    from toma_diffusion.checkpoints import DTYPES

    if size not in SIZES:
        raise ValueError(f"size {size!r} is not known: use one of {', '.join(SIZES)}.")
    if dtype and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    chosen = DTYPES[dtype] if dtype else None
    if name not in MODELS:
        loaded = load(name, device=device, dtype=chosen)
        return loaded, lambda: LoadedParts(loaded)
    small = size == "small" or (size == "auto" and device.type == "cpu")
    denoiser = build(name, small=small, device=device, dtype=chosen)
    return denoiser, lambda: RandomParts(name, denoiser, small=small)
