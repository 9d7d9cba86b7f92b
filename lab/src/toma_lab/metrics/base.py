"""What all metrics share: their input, the source of their weights, and the error if one is not available."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor, nn

Scored = TypeVar("Scored")


class UnavailableError(ValueError):
    """A metric cannot be computed here, usually because its weights are missing. The text says what to do."""


@dataclass(frozen=True)
class Sample:
    """One image to score, as RGB."""

    image: Image
    prompt: str
    reference: Image | None = None
    """The image of the original model for the same prompt and seed. None for that image itself."""

    @cached_property
    def pixels(self) -> Tensor:  # [1, 3, height, width], 0 to 1
        return to_pixels(self.image)

    @cached_property
    def reference_pixels(self) -> Tensor:
        assert self.reference is not None
        return to_pixels(self.reference)


class Metric(ABC, Generic[Scored]):
    """A metric of one image or clip."""

    name: str
    needs_reference: bool = True
    source: str = ""
    """Name and hash of the weights, or empty. Values from different weights are never mixed."""

    @abstractmethod
    def score(self, sample: Scored) -> float: ...

    def scores(self, samples: Sequence[Scored]) -> list[float]:
        """Of several of one size. Metrics that gain from it compute them together."""
        return [self.score(sample) for sample in samples]


ImageMetric = Metric[Sample]


class PairMetric(ImageMetric):
    """A metric of the pixels of two images, computed for several pairs together."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    @abstractmethod
    def distances(self, images: Tensor, references: Tensor) -> Tensor:
        """Of images [B, 3, height, width], 0 to 1, from their references. Returns [B]."""

    def score(self, sample: Sample) -> float:
        return self.scores([sample])[0]

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample]) -> list[float]:
        if not samples:
            return []
        images = torch.cat([sample.pixels for sample in samples]).to(self.device)
        references = torch.cat([sample.reference_pixels for sample in samples]).to(self.device)
        values: list[float] = self.distances(images, references).tolist()
        return values


class JointMetric(ABC):
    """One or more metrics of many images together."""

    names: tuple[str, ...]
    source: str

    @abstractmethod
    def scores(self, paths: Iterable[Path]) -> dict[str, float]:
        """The values for the images in these files, by name. Raises `UnavailableError` if there are none."""


def to_pixels(image: Image) -> Tensor:
    """[1, 3, height, width], 0 to 1."""
    values = torch.from_numpy(np.array(image, dtype=np.uint8))  # [height, width, 3]
    return values.permute(2, 0, 1)[None].contiguous().float() / 255


def describe_file(path: Path) -> str:
    """The file's name and the beginning of its hash, without its path, which is private."""
    return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def describe_model(name: str, model: nn.Module) -> str:
    """The same for a loaded model."""
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return f"{Path(name).name if Path(name).exists() else name} {digest.hexdigest()[:12]}"


def check_file(path: Path | None, metric: str, option: str, what: str) -> Path:
    """The path, if the file can be read."""
    if path is None:
        raise UnavailableError(f"{metric}: give {what} with {option}.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UnavailableError(
            f"{metric}: {str(path)!r} cannot be read ({error.strerror}); give {what} with {option}."
        ) from error
    return path
