"""One bar for a whole search, with the time left. How much is to do is an estimate: candidates drop out on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toma_diffusion.tune.budget import Budget

if TYPE_CHECKING:
    from rich.progress import Progress

MAP_CELL = 0.35
"""What a cell of the map costs, of one image of a candidate with its part of the original's: about half of the steps,
no decoding."""


def measurements_left(budget: Budget, alive: int, rung: int) -> int:
    """Images of candidates that are still to be measured when this rung begins."""
    total, before = 0, budget.rungs[rung - 1] if rung else 0
    for images in budget.rungs[rung:]:
        total += alive * (images - before)
        before, alive = images, max(budget.finalists, (alive + 1) // 2)
    return total + min(alive, budget.finalists) * budget.final_images


class SearchBar:
    """The bar of one process, out of several that share the work."""

    def __init__(self, progress: Progress | None, processes: int = 1) -> None:
        self._progress = progress
        self._processes = processes
        self._bar = None if progress is None else progress.add_task("preparing", total=None)
        self._done = 0.0

    @contextmanager
    def stage(self, what: str, work: float, later: float) -> Iterator[Callable[[float], None]]:
        """A function that notes work done. `later` is the work of all processes after this stage."""
        if self._progress is None or self._bar is None:
            yield lambda amount: None
            return
        progress, bar = self._progress, self._bar
        progress.update(bar, description=what, total=self._done + work + later / self._processes)

        def advance(amount: float) -> None:
            self._done += amount
            progress.update(bar, completed=self._done)

        yield advance
