"""What all metrics have in common: what they are given, what they say of their weights, and why one may be missing."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn


class UnavailableError(ValueError):
    """A metric cannot be computed here, most often for want of weights. The text says what to do."""


@dataclass(frozen=True)
class Sample:
    """One image to judge, as RGB."""

    image: Image
    prompt: str
    reference: Image | None = None
    """What the unmerged model draws of the same prompt and seed; None for that image itself."""

    @cached_property
    def pixels(self) -> Tensor:
        """[1, 3, height, width], 0 to 1."""
        return to_pixels(self.image)

    @cached_property
    def reference_pixels(self) -> Tensor:
        """Of the reference."""
        assert self.reference is not None
        return to_pixels(self.reference)


class ImageMetric(ABC):
    """A figure for one image."""

    name: ClassVar[str]
    needs_reference: ClassVar[bool] = True
    source: str = ""
    """The weights, by a name and what they hold; empty if there are none. Figures of other weights do not mix."""

    @abstractmethod
    def score(self, sample: Sample) -> float:
        """The figure."""


class JointMetric(ABC):
    """One or more figures for many images together."""

    names: tuple[str, ...]
    source: str

    @abstractmethod
    def scores(self, paths: Iterable[Path]) -> dict[str, float]:
        """The figures of the images in these files, by name. An `UnavailableError` says why there are none."""


def to_pixels(image: Image) -> Tensor:
    """[1, 3, height, width], 0 to 1."""
    values = torch.from_numpy(np.array(image, dtype=np.uint8))  # [height, width, 3]
    return values.permute(2, 0, 1)[None].contiguous().float() / 255


def describe_file(path: Path) -> str:
    """Its name and the beginning of its hash; never where it lies, which is nobody's business."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def describe_model(name: str, model: nn.Module) -> str:
    """The same for a model of some files."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{Path(name).name if Path(name).exists() else name} {digest.hexdigest()[:12]}"


def check_file(path: Path | None, metric: str, option: str, what: str) -> Path:
    """The path, if there is a file."""
    if path is None:
        raise UnavailableError(f"{metric}: give {what} with {option}.")
    if not path.is_file():
        raise UnavailableError(f"{metric}: there is no file {str(path)!r}; give {what} with {option}.")
    return path
