"""Files that are never seen half written."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import uuid4

from toma_diffusion.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT)


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
    return f"{error.strerror}: {str(error.filename)!r}" if error.strerror and error.filename else str(error)


@contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file for text (`w`) or bytes (`wb`), which replaces `path` at the end of the `with` block. If
    the process dies before, the old file stays as it was.

    Raises:
        UsageError: The disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")  # threads and machines may share a folder
    encoding, newline = (None, None) if "b" in mode else ("utf-8", "")
    with _disk_full_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open(mode, encoding=encoding, newline=newline) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; when this returns, it is on the disk. What a killed process left of a line is ended
    first, so that it spoils no other.

    Raises:
        UsageError: The disk is full.
    """
    with _disk_full_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            is_cut_off = bool(size) and file.read(1) != b"\n"
            content = (b"\n" if is_cut_off else b"") + line.encode() + b"\n"
            if file.write(content) != len(content):  # a full disk takes a part without an error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())


def read_json(path: str | Path, what: str, writer: str) -> Any:
    """What a file holds. `what` names it in errors, `writer` says what wrote such files.

    Raises:
        UsageError: It cannot be read, or is not JSON.
    """
    advice = f"give a file that {writer} wrote."
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} cannot be read ({error.strerror}): {advice}") from error
    except ValueError as error:
        raise UsageError(f"{what} is not JSON ({error}): {advice}") from error


@contextmanager
def _disk_full_explained(path: Path) -> Iterator[None]:
    """One error in place of that of writing and that of closing the file afterwards."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UsageError(
            f"{str(path)!r} cannot be written: the disk is full. Free some space; the same command goes on."
        ) from None
