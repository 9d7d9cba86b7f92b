"""Tells how far a stage is: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 20.0


class Progress:
    """A progress bar from 0 to 1 with a text. If the output is not a terminal, it prints a line from time to time."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.bar: Any = None
        self.last_line = 0.0
        if sys.stdout.isatty():
            # Not at the top: a machine that only trains may not have it, and there nobody looks at a bar.
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            text = TextColumn("{task.description}")
            self.bar = Progress(TextColumn(title), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), text)
            self.task = self.bar.add_task("", total=1.0)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: float, text: str) -> None:
        """Show that the fraction `done` is behind us."""
        if self.bar is not None:
            self.bar.update(self.task, completed=min(done, 1.0), description=text)
        elif done >= 1.0 or time.monotonic() - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            print(f"{self.title} {min(done, 1.0):4.0%} {text}", flush=True)
