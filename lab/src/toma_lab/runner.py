"""Makes and times pictures with columns, for every command: fitted, warmed up, compiled, counted; what fails is noted.

Work is shared by the processes of an `accelerate launch`. A bug ends the command. What this machine cannot do, such as
a picture that needs more memory than is free, is a row with its reason, which the same command tries again.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from toma_diffusion.api import compiled_blocks, graphs_obstacle
from toma_diffusion.engine.compile import compile_denoiser
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns import Column
from toma_lab.columns.skipped import SkippedSteps, counted_calls
from toma_lab.pipelines.clips import ClipRequest, generate
from toma_lab.pipelines.generation import ImageRequest

if TYPE_CHECKING:
    from accelerate import PartialState

NOT_COMPILED = "none"
WARM_UP_STEPS = 4
"""On a CPU, where only memory is allocated for the first time, and of clips, of which all steps take minutes. With
fewer some presets do nothing."""
Task = TypeVar("Task")


@dataclass(frozen=True)
class Made:
    """Pictures of one call, and what they cost."""

    pictures: Sequence[Any]
    seconds: float
    """For one of them."""
    skipped: float | None = None
    """The share of the steps in which a cache skipped blocks, if there is one."""
    computed: tuple[int, ...] | None = None
    """Which steps were computed, if the library skipped others."""
    calls: int = 0
    """For which a denoiser ran."""


@dataclass(eq=False)
class Maker:
    """Makes pictures with one pipeline, in runs of one number of steps."""

    pipe: Any
    steps: int
    compile: str = NOT_COMPILED
    warms_up: bool = True
    """Whether a column is run once before it is timed."""
    fits_with: ImageRequest | None = None
    """What columns are fitted by, so that a resumed run gives the same. None: by the first request."""
    _ready: dict[Column, Column] = field(default_factory=dict)
    """Columns that were run before in this process, fitted to the model where they must be."""

    def make(self, column: Column, requests: Sequence[ImageRequest]) -> Made:
        """Generate the pictures of these requests in one call, whose steps are those that the column asks for."""
        is_new = column not in self._ready
        if is_new:
            fit = replace(self.fits_with or requests[0], steps=column.requested_steps(self.steps))
            self._ready[column] = column.fitted(self.pipe, lambda: generate(self.pipe, [fit]), self.steps)
        if is_new and self.warms_up and self.compile == NOT_COMPILED:
            try:
                with self._on(column):
                    warm_up(self.pipe, requests)
            except BaseException:
                del self._ready[column]  # the next try is warmed up too
                raise
        with self._on(column) as handle, ExitStack() as counting:
            if self.compile != NOT_COMPILED:  # compiled anew, and must see steps of every kind
                warm_up(self.pipe, requests, short_clips=False)
            skipped = None
            if column.is_cached:
                skipped = counting.enter_context(SkippedSteps.by(column.shortcuts, self.pipe))
            calls = counting.enter_context(counted_calls(self.pipe))
            started = perf_counter()
            pictures = generate(self.pipe, list(requests))
            seconds = (perf_counter() - started) / len(requests)
            skip = None if handle is None else handle.summary().skip
        return Made(pictures, seconds, None if skipped is None else skipped.share, skip and skip.computed, len(calls))

    @contextmanager
    def _on(self, column: Column) -> Iterator[Any]:
        with self._ready[column].applied(self.pipe, self.steps) as handle, self._compiled(handle):
            yield handle

    @contextmanager
    def _compiled(self, handle: Any) -> Iterator[None]:
        if self.compile == NOT_COMPILED:
            yield
        elif handle is not None:
            handle.compile(self.compile)  # undone when the handle is removed
            yield
        else:
            models = find_denoisers(self.pipe)
            compiled = [compile_denoiser(m, self.compile, compiled_blocks(m), graphs_obstacle(m)) for m in models]
            try:
                yield
            finally:
                for model, each in zip(models, compiled, strict=True):
                    each.undo(model)


def warm_up(pipe: Any, requests: Sequence[ImageRequest], *, short_clips: bool = True) -> None:
    """Generate pictures that do not count: all steps on a GPU, where the first step of each kind compiles kernels."""
    if pipe.device.type == "cpu" or (short_clips and isinstance(requests[0], ClipRequest)):
        requests = [replace(each, steps=min(each.steps, WARM_UP_STEPS)) for each in requests]
    with ignoring("a generation of .* was not made faster at all"):  # none of these few steps may lie in the window
        generate(pipe, list(requests))


def failure_of(error: Exception) -> str:
    """Why a picture cannot be made here, in a line. Raises the error again if it is a bug."""
    if not (isinstance(error, UsageError) or is_out_of_memory(error) or _is_uncompilable(error)):
        raise error
    reason = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {reason}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU, or a CPU, had no memory left."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _is_uncompilable(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def free_memory() -> None:
    """After a failure. Call it outside of the handler, where the traceback still holds its tensors."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def ignoring(message: str) -> Iterator[None]:
    """Without warnings of this beginning. Their filters are shared by all threads, so that only the main one changes
    them: in a server the others print what they warn of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


def shares(state: PartialState, tasks: list[list[Task]]) -> list[list[Task]]:
    """This process's part of each list.

    The first process decides what is to be done: the others may look at the folder after work on it has started.
    """
    from accelerate.utils import broadcast_object_list

    agreed: list[list[Task]] = broadcast_object_list([tasks])[0]
    parts = []
    for each in agreed:
        with state.split_between_processes(each) as part:
            parts.append(list(part))
    return parts
