"""Several benchmarks on one GPU: all compile at once, one at a time is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from toma_diffusion.errors import UsageError


class Turns:
    """Locks on two files that all of them are given. Most of a compiled cell's time goes into compiling, on the CPU.

    `quiet` is shared by those that prepare and held by the one that times. `gate` is shared by those that time or wait
    to: who would prepare waits there until there are none, or else one after another would time, go back to preparing
    and keep all others waiting. A process that dies gives its locks back.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is not None and sys.platform == "win32":
            raise UsageError(f"--take-turns {str(path)!r} needs file locks that Windows does not have: leave it out.")
        self.path = path
        self._quiet: IO[Any] | None = None
        self._gate: IO[Any] | None = None
        self._prepares = False

    def __enter__(self) -> Turns:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._quiet = self.path.open("a")
            self._gate = self.path.with_name(self.path.name + ".gate").open("a")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._quiet, self._gate):
            if file is not None:
                file.close()
        self._quiet = self._gate = None
        self._prepares = False

    def prepare(self) -> None:
        """Wait until no other process times anything or waits to. Until `alone`, others may work at the same time."""
        if self._prepares:
            return
        _lock(self._gate, "LOCK_EX")
        _lock(self._quiet, "LOCK_SH")
        _lock(self._gate, "LOCK_UN")
        self._prepares = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other prepares or times anything, and keep them waiting. Afterwards only `prepare` waits."""
        _lock(self._quiet, "LOCK_UN")
        self._prepares = False
        _lock(self._gate, "LOCK_SH")
        _lock(self._quiet, "LOCK_EX")
        try:
            yield
        finally:
            _lock(self._quiet, "LOCK_UN")
            _lock(self._gate, "LOCK_UN")


def _lock(file: IO[Any] | None, kind: str) -> None:
    if file is not None:
        import fcntl  # not on Windows

        fcntl.flock(file, getattr(fcntl, kind))
