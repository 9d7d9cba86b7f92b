"""Keeps what learning has found so far, so that it goes on where it was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing

SETTINGS = "settings.json"


class Store(Protocol):
    """What learning needs of it."""

    def read(self, name: str) -> Any:
        """What was kept under this name; None if nothing was."""

    def write(self, name: str, value: Any) -> None:
        """Keep plain values and tensors."""


class NoStore:
    """Keeps nothing."""

    def read(self, name: str) -> Any: ...

    def write(self, name: str, value: Any) -> None: ...


class FolderStore:
    """Keeps it in a folder, a file for every name. A folder with values of other settings is refused."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder, path = folder, folder / SETTINGS
        check_writable(path)
        if not path.exists():
            with replacing(path) as file:
                file.write(json.dumps(dict(settings), indent=2) + "\n")
            return
        held = json.loads(path.read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(dict(settings)))
        differs = [name for name in {**held, **wanted} if held.get(name) != wanted.get(name)]
        if differs:
            name = differs[0]
            raise UsageError(
                f"{str(folder)!r} belongs to another learning, with {name}={held.get(name)!r}, not "
                f"{wanted.get(name)!r}: delete the folder (`toma learn --fresh` does), or name another one."
            )

    def read(self, name: str) -> Any:
        path = self.folder / f"{name}.pt"
        return torch.load(path, weights_only=True) if path.exists() else None

    def write(self, name: str, value: Any) -> None:
        with replacing(self.folder / f"{name}.pt", "wb") as file:
            torch.save(value, file)

    def delete(self) -> None:
        self.clear(self.folder)

    @staticmethod
    def clear(folder: Path) -> None:
        """Delete a folder of this kind."""
        if (folder / SETTINGS).exists():
            shutil.rmtree(folder)
