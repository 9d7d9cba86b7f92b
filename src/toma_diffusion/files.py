"""Files that are never seen half written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any


def check_writable(path: Path) -> None:
    """Find out before long work whether its result can be written there. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: give the name of a file.")
    with TemporaryFile(dir=path.parent):
        pass


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """A file to write in place of `path`, text (`w`) or bytes (`wb`). At the end it takes that place, on the disk and
    whole; whatever kills us before leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
    try:
        with temporary.open(mode, encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
