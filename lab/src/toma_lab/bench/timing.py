"""Times whole generations, with all steps as they are: those that select, those that do not, and skipped ones.

Not by `triton.testing.do_bench`: it runs a function five times to choose how often to repeat it, and empties the GPU's
cache before each time. Here a run is a whole generation, of which one takes minutes on a large model, and the cache
is what the step before left in it. Single operators are timed by it (benchmarks/operators.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


@dataclass(eq=False)
class Generation:
    """The denoiser's calls of one image, from the first step to the last."""

    model: Any
    calls: list[dict[str, Any]]
    """The keyword arguments of every step."""
    handle: Any = None
    """If tokens are merged or steps skipped."""

    def run(self, steps: int | None = None) -> Tensor:
        """All steps, or the first ones. Returns the last one's output."""
        is_cached = getattr(self.model, "is_cache_enabled", False)
        if is_cached:
            self.model._reset_stateful_cache()
        if self.handle is not None:
            self.handle.begin(len(self.calls))
        context: AbstractContextManager[Any] = self.model.cache_context("cond") if is_cached else nullcontext()
        with torch.no_grad(), context:
            for step, call in enumerate(self.calls[:steps]):
                if self.handle is not None:
                    self.handle.step(step)
                output: Tensor | list[Tensor] = self.model(**call, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output  # a list of samples, as Z-Image returns


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step, over several runs."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        if len(milliseconds) == 1:
            return cls(*milliseconds * 3)
        fifths = statistics.quantiles(milliseconds, n=5, method="inclusive")
        return cls(statistics.median(milliseconds), fifths[0], fifths[3])


def time_runs(run: Callable[[], object], repeats: int, steps: int, device: torch.device) -> Timing:
    """Repeat a run of `steps` steps: by CUDA events around the whole run on a GPU, by the clock on a CPU."""
    measure = _milliseconds_on_gpu if device.type == "cuda" else _milliseconds_by_clock
    return Timing.of([measure(run, device) / steps for _ in range(repeats)])


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time from the call until the device is done, so that CPU time counts too."""
    return statistics.median(_milliseconds_by_clock(run, device) for _ in range(repeats)) / 1e3


def _milliseconds_on_gpu(run: Callable[[], object], device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _milliseconds_by_clock(run: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def synchronize(device: torch.device) -> None:
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
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream that was ever used, by earlier columns too
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.mib = torch.cuda.max_memory_allocated() / MIB


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """A whole run as one CUDA graph: replaying it costs the kernels alone."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # all buffers must exist before the capture, and the libraries' workspaces on this stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    torch.cuda.synchronize()
    return graph.replay
