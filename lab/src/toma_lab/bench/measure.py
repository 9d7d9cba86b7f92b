"""One cell: apply the method, compile, warm up, time, and leave the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from toma_diffusion.engine.summary import NOTHING_MERGED
from torch import Tensor

from toma_diffusion.api import apply_toma
from toma_diffusion.engine.install import find_root
from toma_diffusion.handle import ToMAHandle
from toma_lab.bench import caching
from toma_lab.bench.models import Denoiser
from toma_lab.bench.pipelines import EndToEnd
from toma_lab.bench.scenario import Group
from toma_lab.bench.timing import (
    Generation,
    PeakMemory,
    Timing,
    capture,
    compile_model,
    forget_compiled,
    median_seconds,
    synchronize,
    time_runs,
)
from toma_lab.bench.turns import Turns
from toma_lab.experiments.cells import Cell


@dataclass(frozen=True)
class Measured:
    """The result of one cell."""

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
    cell: Cell,
    *,
    repeats: int,
    end_to_end: EndToEnd | None,
    turns: Turns,
    stage: Callable[[str], None],
) -> Measured:
    """Time `repeats` runs of one cell, when it is its turn. `stage` is called with what is being done."""
    turns.prepare()
    steps = group.steps if cell.shortcut is None else cell.shortcut.steps_of(group.steps)
    is_compiled, is_cached = group.compile != "none", group.cache is not None or cell.is_cached
    generation = Generation(denoiser.model, calls(denoiser, group, steps, moves=is_cached))
    with ExitStack() as undo:
        if cell.config is not None:
            generation.handle = undo.enter_context(apply_toma(denoiser.model, cell.config))
        if cell.shortcut is not None:
            pipe = SimpleNamespace(transformer=denoiser.model)
            ready = cell.shortcut.fitted(pipe, generation.run, steps)
            undo.enter_context(ready.applied(pipe, steps))
        hits = caching.share_of_hits(generation) if is_cached else None
        if is_compiled:
            undo.callback(forget_compiled, denoiser.model, free=group.mode != "graph" and not denoiser.is_large)
            compile_model(generation, group.compile, fullgraph=not is_cached)
        stage("compiling" if is_compiled else "warming up")
        few = len(generation.calls) if is_cached else generation.representative_steps()
        output = generation.run(few)
        if end_to_end is not None:  # a pipeline may call the model in another way, which is compiled for itself
            _image(end_to_end, group, generation)
        stage("waiting to time")
        synchronize(denoiser.device)  # what is queued would still run while another process times
        undo.enter_context(turns.alone())
        stage("timing")
        peak = PeakMemory(denoiser.device)
        run: Callable[[], object] = generation.run
        if group.mode == "graph":  # a replayed graph allocates nothing
            with peak:
                generation.run(few)
            run = capture(generation)
        with ExitStack() as timed:
            if is_compiled and not is_cached:
                timed.enter_context(_no_recompilation())
            if group.mode != "graph":  # in the runs that are timed: of a large model each takes seconds
                timed.enter_context(peak)
            timing = time_runs(run, repeats, group.steps, denoiser.device)
        seconds = None
        if end_to_end is not None:
            stage("timing the pipeline with")
            seconds = _pipeline_seconds(end_to_end, group, generation, repeats, denoiser.device)
        return Measured(timing, peak.mib, seconds, hits, _backend(cell, denoiser), tuple(_warnings(output, denoiser)))


def calls(denoiser: Denoiser, group: Group, steps: int, *, moves: bool) -> list[dict[str, Any]]:
    """The keyword arguments of every step. The sample `moves` from step to step only if there is a cache."""
    inputs = denoiser.inputs(group.batch, group.resolution.width, group.resolution.height, group.frames)
    if moves:
        return caching.moving_calls(inputs, denoiser.family.sample, steps)
    return [inputs] * steps


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


def _pipeline_seconds(
    end_to_end: EndToEnd, group: Group, generation: Generation, repeats: int, device: torch.device
) -> float:
    _image(end_to_end, group, generation)
    return median_seconds(lambda: end_to_end.image(group), repeats, device)


def _image(end_to_end: EndToEnd, group: Group, generation: Generation) -> None:
    """The first image, and all after it: from now on the steps are read from the pipeline."""
    if generation.handle is not None:
        generation.handle.reset()
    end_to_end.image(group)


def _backend(cell: Cell, denoiser: Denoiser) -> str:
    """What ran the operators."""
    root = find_root(denoiser.model)
    if root is None or cell.config is None:
        return ""
    return ToMAHandle(denoiser.model).summary().backend or ""


def _warnings(output: Tensor, denoiser: Denoiser) -> Iterator[str]:
    if not bool(torch.isfinite(output).all()):
        yield "the output is not finite"
    root = find_root(denoiser.model)
    if root is not None and root.outermost is None and (root.state.merges_nothing or not root.state.current):
        yield NOTHING_MERGED


def _no_recompilation() -> AbstractContextManager[Any]:
    """Fail if a run compiles anything: its time would not be that of the model."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance
