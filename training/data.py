"""Reads captioned images: WebP files joined in `blob` at the offsets `off`, with `label`, `classes` and `caption`."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from training.captions import concept, may_mirror

SETS = ("fluent_emoji", "clothing")


@dataclass(frozen=True)
class Dataset:
    """All images in memory, with what is said about them."""

    images: NDArray[np.uint8]  # [images, height, width, 3]
    captions: list[str]
    sizes: tuple[int, ...]  # images of each of the SETS, one set after the other
    mirror: Tensor  # [images], bool: may be shown mirrored

    def __len__(self) -> int:
        return len(self.captions)

    def weights(self, emoji_share: float = 0.5, concept_power: float = 0.5) -> Tensor:
        """How often each image is drawn, of one in all; see `Settings`. Autoencoders see both sets equally often."""
        weights, start = [], 0
        for size, share in zip(self.sizes, (emoji_share, 1 - emoji_share), strict=True):
            weights.append(share * sampling_weights(self.captions[start : start + size], concept_power))
            start += size
        return torch.cat(weights)

    def pixels(self, device: torch.device) -> Tensor:
        """The images on the device, as bytes: [images, 3, height, width], 1.6 GB for the full data."""
        return torch.from_numpy(self.images).to(device).permute(0, 3, 1, 2)


def to_float(pixels: Tensor) -> Tensor:
    """Bytes to the range [-1, 1] that autoencoders take."""
    return pixels.float() / 127.5 - 1


def sampling_weights(captions: list[str], power: float) -> Tensor:
    """Weights within one set, 1/nᵖ for each of n images of one concept.

    Half of the emoji are one person in six skin tones and a fifth of the clothes are T-shirts: drawn evenly, they would
    crowd out the rest.
    """
    concepts = [concept(caption) for caption in captions]
    counts = Counter(concepts)
    weights = torch.tensor([counts[name] ** -power for name in concepts], dtype=torch.float64)
    return weights / weights.sum()


def read_image(data: bytes, size: int) -> NDArray[np.uint8]:
    """One image as bytes, at the size asked for."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(image)


@dataclass(frozen=True)
class Files:
    """One set as it is stored: WebP files, and what is said about each."""

    files: list[bytes]
    captions: list[str]
    classes: list[str]


def read_set(folder: Path, name: str, limit: int | None = None) -> Files:
    """Read one of the SETS without decoding its images. `limit` takes so many of them, for trying out."""
    path = folder / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}. Give the folder of {', '.join(SETS)} (.npz) as --data.")
    with np.load(path) as arrays:
        blob, offsets, labels = arrays["blob"], arrays["off"], arrays["label"][:limit]
        classes, captions = json.loads(str(arrays["classes"])), json.loads(str(arrays["caption"]))[:limit]
    files = [blob[start:end].tobytes() for start, end in pairwise(offsets[: len(captions) + 1])]
    return Files(files, captions, [classes[label] for label in labels])


def read_images(files: Sequence[bytes], size: int) -> list[NDArray[np.uint8]]:
    """Many images at once: decoding releases Python's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda file: read_image(file, size), files))


def load(folder: Path, size: int, limit: int | None = None) -> Dataset:
    """Read both sets. `limit` takes so many images of each set, for trying out."""
    sets = [read_set(folder, name, limit) for name in SETS]
    return Dataset(
        np.stack([image for each in sets for image in read_images(each.files, size)]),
        [caption for each in sets for caption in each.captions],
        tuple(len(each.captions) for each in sets),
        torch.tensor([may_mirror(*words) for each in sets for words in zip(each.captions, each.classes, strict=True)]),
    )
