"""One bar for a whole search, with the time left. How much is to do is an estimate: candidates drop out on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toma_lab.tune.budget import Budget

if TYPE_CHECKING:
    from rich.progress import Progress

GENERATED = 1.5
"""Images or clips that one measurement generates: that of the candidate, and every second time the original."""
MOVED = 12
"""Candidates of one climb, about: 7 steps of 8 can be moved, most of them earlier and later."""
MAP_CELL = 0.35
"""What a cell of the map costs, of one image of a candidate with its part of the original's: about half of the steps,
no decoding."""


def measurements_left(budget: Budget, alive: int, rung: int, climbs: int) -> int:
    """Images of candidates that are still to be measured when this rung begins, with so many climbs after it."""
    finals = min(alive, budget.finalists) * budget.final_images
    return _of_rungs(budget, alive, rung) + climbs * _of_rungs(budget, MOVED, 0) + finals


def later_measurements(budget: Budget, alive: int, rung: int, climbs: int) -> int:
    """Those that are still to be made when this rung ends."""
    before = budget.rungs[rung - 1] if rung else 0
    return measurements_left(budget, alive, rung, climbs) - alive * (budget.rungs[rung] - before)


def _of_rungs(budget: Budget, alive: int, rung: int) -> int:
    """Images of this rung and those after it."""
    total, before = 0, budget.rungs[rung - 1] if rung else 0
    for images in budget.rungs[rung:]:
        total += alive * (images - before)
        before, alive = images, max(budget.finalists, (alive + 1) // 2)
    return total


class SearchBar:
    """The bar of one process, out of several that share the work."""

    def __init__(self, progress: Progress | None, processes: int = 1) -> None:
        self._progress = progress
        self._processes = processes
        self._bar = None if progress is None else progress.add_task("preparing", total=None)
        self._done = 0.0
        self._total = 0.0
        self._has_announced = False

    def announce(self, thing: str, steps: int, seconds: float) -> None:
        """Print once how long the rest takes if each image or clip takes so many seconds."""
        if self._progress is None or self._has_announced:
            return
        self._has_announced = True
        count = max(1, round(GENERATED * (self._total - self._done)))
        share = "" if self._processes == 1 else f" on each of {self._processes} processes"
        self._progress.console.print(
            f"Estimate: about {count} {thing}s{share}, of {steps} steps and {in_time(seconds)} each as the model is: "
            f"{in_time(count * seconds)}; less if candidates are faster, more for warming up and decoding.",
            highlight=False,
            soft_wrap=True,
        )

    @contextmanager
    def stage(self, what: str, work: float, later: float) -> Iterator[Callable[[float], None]]:
        """A function that notes work done. `later` is the work of all processes after this stage."""
        if self._progress is None or self._bar is None:
            yield lambda amount: None
            return
        progress, bar = self._progress, self._bar
        self._total = self._done + work + later / self._processes
        progress.update(bar, description=what, total=self._total)

        def advance(amount: float) -> None:
            self._done += amount
            progress.update(bar, completed=self._done)

        yield advance


def in_time(seconds: float) -> str:
    """`12 s`, `9 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
