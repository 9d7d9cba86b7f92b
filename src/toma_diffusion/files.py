"""Files that are never seen half written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

from toma_diffusion.errors import UsageError


def check_writable(path: Path) -> None:
    """Make sure, before long work, that its result can be written to this file. Makes the folder.

    Raises:
        UsageError: The file cannot be written there.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{str(path)!r} is a folder: give the name of a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {_reason(error)}. Give a path in a folder that you may write to."
        ) from error


def _reason(error: OSError) -> str:
    """What is wrong, with the path that it is wrong with."""
    return f"{error.strerror}: {str(error.filename)!r}" if error.strerror and error.filename else str(error)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file for text (`w`) or bytes (`wb`), which replaces `path` at the end of the `with` block. If
    the process dies before, the old file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")  # processes of several machines may share a folder
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
    try:
        with temporary.open(mode, encoding=encoding, newline=newline) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
