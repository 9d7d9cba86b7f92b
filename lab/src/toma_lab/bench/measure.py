"""One column: apply the method, compile, warm up, time, and leave the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.api import compiled_blocks, graphs_obstacle
from toma_diffusion.engine.compile import compile_denoiser
from toma_lab.bench.group import Group
from toma_lab.bench.pipelines import EndToEnd
from toma_lab.bench.timing import (
    Generation,
    PeakMemory,
    Timing,
    capture,
    median_seconds,
    synchronize,
    time_runs,
)
from toma_lab.bench.turns import Turns
from toma_lab.bench.zoo import Denoiser
from toma_lab.columns import Column
from toma_lab.columns.skipped import SkippedSteps

COMPILE_MODES = {"block": "blocks", "whole": "whole", "graphs": "graphs"}
"""From the column `compile` of a row to the mode of `handle.compile`."""


@dataclass(frozen=True)
class Measured:
    """The result of one column."""

    timing: Timing
    peak_mib: float | None
    pipeline_s: float | None
    cache_hits: float | None
    backend: str
    warnings: tuple[str, ...]
    """Reasons why the time may mean little."""


def measure(
    denoiser: Denoiser,
    group: Group,
    column: Column,
    *,
    repeats: int,
    end_to_end: EndToEnd | None,
    turns: Turns,
    stage: Callable[[str], None],
) -> Measured:
    """Time `repeats` runs of one column, when it is its turn. `stage` is called with what is being done."""
    turns.prepare()
    is_compiled, is_cached = group.compile != "none", group.cache is not None or column.is_cached
    with ExitStack() as undo:
        generation = undo.enter_context(applied(column, denoiser, group, moves=is_cached))
        hits = share_of_hits(generation) if is_cached else None
        if is_compiled:
            free = group.mode != "graph" and not denoiser.is_large
            undo.enter_context(compiled(generation, group.compile, free=free, fullgraph=not is_cached))
        stage("compiling" if is_compiled else "warming up")
        few = 1 if generation.handle is None and not is_cached else None  # then all steps do the same
        output = generation.run(few)
        if end_to_end is not None:  # a pipeline may call the model in another way, which is compiled for itself
            if generation.handle is not None:
                generation.handle.reset()  # from now on the steps are read from the pipeline
            end_to_end.image(group)
        stage("waiting to time")
        synchronize(denoiser.device)  # what is queued would still run while another process times
        undo.enter_context(turns.alone())
        stage("timing")
        peak = PeakMemory(denoiser.device)
        run: Callable[[], object] = generation.run
        if group.mode == "graph":  # a replayed graph allocates nothing
            with peak:
                generation.run(few)
            run = capture(generation.run)
        with ExitStack() as timed:
            if is_compiled and not is_cached:  # the time of a run that compiles is not that of the model
                timed.enter_context(torch.compiler.set_stance("fail_on_recompile"))
            if group.mode != "graph":  # in the runs that are timed: of a large model each takes seconds
                timed.enter_context(peak)
            timing = time_runs(run, repeats, group.steps, denoiser.device)
        seconds = None
        if end_to_end is not None:
            stage("timing the pipeline with")
            if generation.handle is not None:
                generation.handle.reset()
            end_to_end.image(group)
            seconds = median_seconds(lambda: end_to_end.image(group), repeats, denoiser.device)
        backend, warnings = _findings(generation, output)
        return Measured(timing, peak.mib, seconds, hits, backend, warnings)


@contextmanager
def applied(column: Column, denoiser: Denoiser, group: Group, *, moves: bool) -> Iterator[Generation]:
    """The calls of a generation, with a column's settings in force for the duration of a `with` block."""
    model: Any = denoiser.model
    generation = Generation(model, calls(denoiser, group, column.steps_of(group.steps), moves=moves))
    with column.fitted(model, generation.run, group.steps).applied(model, group.steps) as generation.handle:
        yield generation


def calls(denoiser: Denoiser, group: Group, steps: int, *, moves: bool) -> list[dict[str, Any]]:
    """The keyword arguments of every step.

    Args:
        moves: for caches, which look at what changes: the sample goes on a straight line from noise towards another
            tensor. That is the path of a flow model, so that successive samples differ as much as in an image.
    """
    inputs = denoiser.inputs(group.batch, group.resolution.width, group.resolution.height, group.frames)
    if not moves:
        return [inputs] * steps
    name = denoiser.family.sample
    start: Tensor = inputs[name]
    end = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)).to(start)
    return [inputs | {name: torch.lerp(start, end, step / steps)} for step in range(steps)]


def share_of_hits(generation: Generation) -> float:
    """The fraction of steps in which a cache skipped blocks. Call it before compiling."""
    with SkippedSteps(generation.model) as skipped:
        generation.run()
    return skipped.share


@contextmanager
def compiled(generation: Generation, how: str, *, free: bool = True, **options: Any) -> Iterator[None]:
    """Compile at the next call, for the duration of a `with` block: `block` by block, `whole`, or as CUDA `graphs`.

    Args:
        free: forget afterwards what was compiled. This costs the next column its own, where both share blocks; to keep
            it costs every compiled call a look through more variants, which matters unless CUDA graphs are replayed or
            the GPU is far behind the CPU.
        options: of `torch.compile`.
    """
    model, mode = generation.model, COMPILE_MODES[how]
    if generation.handle is not None:
        generation.handle.compile(mode, **options)  # undone with the handle
        yield
    else:
        compilation = compile_denoiser(model, mode, compiled_blocks(model), graphs_obstacle(model), **options)
        try:
            yield
        finally:
            compilation.undo(model)
    if free:
        torch.compiler.reset()


def attention_of(model: Any) -> str:
    """Which attention runs: torch's own, called directly or through diffusers' choice of backends."""
    processors = getattr(model, "attn_processors", {}).values()
    chosen = {each._attention_backend for each in processors if hasattr(each, "_attention_backend")}
    if not chosen:
        return "sdpa"
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    registry: Any = _AttentionBackendRegistry
    active = registry.get_active_backend()
    default = active[0] if isinstance(active, tuple) else active
    names = {str(getattr(each or default, "value", each or default)) for each in chosen}
    return "sdpa:" + "+".join(sorted(names))


def _findings(generation: Generation, output: Tensor) -> tuple[str, tuple[str, ...]]:
    """What ran the operators, and reasons why the time may mean little."""
    warnings = () if bool(torch.isfinite(output).all()) else ("the output is not finite",)
    if generation.handle is None:
        return "", warnings
    summary = generation.handle.summary()
    empty = tuple(note for note in summary.notes if note.startswith("nothing was merged:"))
    return (summary.merge and summary.merge.backend) or "", warnings + empty
