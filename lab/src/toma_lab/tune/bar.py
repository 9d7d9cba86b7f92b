"""The progress of a search, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class SearchBar:
    """The bar of one process. Without `progress` nothing is shown."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._bar = None if progress is None else progress.add_task("preparing", total=None)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, what: str, work: float) -> Iterator[Callable[[float], None]]:
        """A function that notes how much of the work of a stage was done."""
        if self._progress is None or self._bar is None:
            yield lambda amount: None
            return
        progress, bar = self._progress, self._bar
        progress.reset(bar, total=work)
        progress.update(bar, description=what)
        yield lambda amount: progress.update(bar, advance=amount)
