"""Several benchmarks on one GPU: they compile side by side, and time one at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class Turns:
    """A lock on a file that all of them are given: shared while one prepares, exclusive while it times.

    Most of a compiled cell's time goes into compiling, on the CPU. A process that dies gives its lock back.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None and sys.platform == "win32":
            raise ValueError(f"--take-turns {str(path)!r} needs file locks that Windows does not have: leave it out.")
        self.path = path
        self._file: IO[Any] | None = None

    def __enter__(self) -> Turns:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
            self._lock("LOCK_SH")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other prepares or times anything, and keep them waiting."""
        self._lock("LOCK_EX")
        try:
            yield
        finally:
            self._lock("LOCK_SH")

    def _lock(self, kind: str) -> None:
        if self._file is not None:
            import fcntl  # not on Windows

            fcntl.flock(self._file, getattr(fcntl, kind))
