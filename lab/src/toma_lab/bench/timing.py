"""Times whole generations, with all steps of the schedule: those that select, those that do not, and skipped ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toma_diffusion.api import compiled_blocks
from toma_diffusion.engine.compile import compile_denoiser, undo_compile
from toma_diffusion.engine.install import find_root
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.merge import Action
from toma_diffusion.skip.schedule import computed_steps

MIB = 2**20
COMPILE_MODES = {"block": "blocks", "whole": "whole", "graphs": "graphs"}
"""From the column `compile` of a row to the mode of `ToMAHandle.compile`."""


class StepKind(NamedTuple):
    """What a step does."""

    is_skipped: bool = False
    """Whether the denoiser does not run, and its output is predicted."""
    action: Action | None = None
    """What plans do; None if no tokens are merged."""


@dataclass(eq=False)
class Generation:
    """The denoiser's calls of one image, from the first step to the last."""

    model: Any
    calls: list[dict[str, Any]]
    """The keyword arguments of every step."""
    handle: ToMAHandle | None = None
    """If tokens are merged or steps skipped."""
    _was_skipped: bool = field(default=False, init=False)
    """Whether the last step was."""

    def begin(self) -> None:
        """Start again: the next call is the first step, and a block cache is empty."""
        if self.handle is not None:
            self.handle.begin(len(self.calls))
        if getattr(self.model, "is_cache_enabled", False):
            self.model._reset_stateful_cache()

    def call(self, step: int) -> Tensor:
        """One step."""
        if self.handle is not None:
            self.handle.step(step)
        skipped_before = self._skipped_steps()
        output: Tensor | list[Tensor] = self.model(**self.calls[step], return_dict=False)[0]
        self._was_skipped = self._skipped_steps() > skipped_before
        return torch.stack(output) if isinstance(output, list) else output  # a list of samples, as Z-Image returns

    def run(self, steps: int | None = None) -> Tensor:
        """All steps, or the first ones. Returns the last one's output."""
        self.begin()
        with torch.no_grad(), cache_context(self.model):
            for step in range(steps or len(self.calls)):
                output = self.call(step)
        return output

    def representative_steps(self) -> int:
        """How many steps, from the first, do all that a generation without a cache does: of a large model every one
        takes seconds."""
        if len(set(self.kinds())) > 1:
            return len(self.calls)
        return 1 if self.handle is None else min(2, len(self.calls))  # the first step makes buffers, others find them

    def kinds(self) -> list[StepKind]:
        """What every step does, by the schedule."""
        root, steps = find_root(self.model), len(self.calls)
        if root is None:
            return [StepKind()] * steps
        skip, schedule = root.state.config.skip, root.state.schedule
        computed = tuple(range(steps)) if skip is None else computed_steps(skip, steps)
        merges = bool(root.state.slots)
        return [
            StepKind(False, schedule.action(step, steps, computed) if merges else None)
            if step in computed
            else StepKind(is_skipped=True)
            for step in range(steps)
        ]

    def last_kind(self) -> StepKind:
        """What the last call did."""
        root = find_root(self.model)
        if root is None or self._was_skipped:
            return StepKind(self._was_skipped)
        state = root.state
        return StepKind(False, state.action if state.active and state.slots else None)

    def _skipped_steps(self) -> int:
        """How many steps of this generation were skipped so far."""
        root = find_root(self.model)
        return 0 if root is None or root.outermost is None else root.outermost.counts[1]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step, over several runs."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        """Summarize the samples."""
        if len(milliseconds) == 1:
            return cls(*milliseconds * 3)
        fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
        return cls(statistics.median(milliseconds), fifths[0], fifths[3])


def cache_context(model: Any) -> AbstractContextManager[Any]:
    """The context in which diffusers' pipelines call a denoiser with a block cache."""
    context: AbstractContextManager[Any] = nullcontext()
    if getattr(model, "is_cache_enabled", False):
        context = model.cache_context("cond")
    return context


def time_runs(run: Callable[[], object], repeats: int, steps: int, device: torch.device) -> Timing:
    """Repeat a run of `steps` steps: by CUDA events around the whole run on a GPU, by the clock on a CPU."""
    measure = _milliseconds_on_gpu if device.type == "cuda" else _milliseconds_on_cpu
    return Timing.of([measure(run) / steps for _ in range(repeats)])


def _milliseconds_on_gpu(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _milliseconds_on_cpu(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time from the call until the device is done, so that CPU time counts too."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class PeakMemory:
    """The most memory in use at any moment inside the `with`, weights included. Not known on a CPU."""

    device: torch.device
    mib: float | None = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream that was ever used, by earlier cells too
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.mib = torch.cuda.max_memory_allocated() / MIB


def compile_model(generation: Generation, how: str, *, fullgraph: bool = True, backend: str = "inductor") -> None:
    """Compile at the next call: `block` by block, `whole`, or whole as CUDA `graphs`; `none` does nothing."""
    if how == "none":
        return
    mode = COMPILE_MODES[how]
    options: dict[str, Any] = {"fullgraph": fullgraph, "backend": backend}
    if generation.handle is not None:
        generation.handle.compile(mode, **options)
    else:
        compile_denoiser(generation.model, mode, compiled_blocks(generation.model), **options)


def forget_compiled(model: nn.Module, *, free: bool) -> None:
    """Undo `compile_model`. To `free` what was compiled costs the next cell its own, where both share blocks; to keep
    it costs every compiled call a look through more variants, which matters unless CUDA graphs are replayed or the GPU
    is far behind the CPU."""
    undo_compile(model)
    if free:
        torch.compiler.reset()


def capture(generation: Generation) -> Callable[[], None]:
    """A generation as CUDA graphs, one for every kind of step: replaying them costs the kernels alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        generation.run()  # all buffers must exist before the capture, and the libraries' workspaces on this stream
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
    kinds = generation.kinds()
    generation.begin()
    with torch.no_grad():
        for step, kind in enumerate(kinds):
            if kind in graphs:
                generation.call(step)
            else:
                graphs[kind] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[kind], pool=pool, stream=stream):
                    generation.call(step)
            if generation.last_kind() != kind:
                raise RuntimeError(f"step {step} did {generation.last_kind()}, but the schedule says {kind}.")
    torch.cuda.synchronize()
    order = [graphs[kind] for kind in kinds]

    def replay() -> None:
        for graph in order:
            graph.replay()

    return replay
