"""FID (Heusel et al. 2017) and KID (Bińkowski et al. 2018): how near all images of a run are to real ones, together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from toma_lab.metrics.base import JointMetric, UnavailableError, check_file, describe_file, to_pixels

SIDE = 299
BATCH = 32
SUBSET = 1000
"""Images in each of the random subsets over which KID is averaged, if there are that many."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


class Inception(JointMetric):
    """Both from the same features, against a folder of real images. Lower is nearer, for both.

    FID from few images is too high, and figures from different numbers of images cannot be compared. KID has no such
    bias, but varies more.
    """

    def __init__(
        self, names: Iterable[str], weights: Path | None, real_images: Path | None, device: torch.device
    ) -> None:
        self.names = tuple(names)
        label = " and ".join(self.names)
        path = check_file(weights, label, "--inception-weights", "a TorchScript file of Inception-v3's 2048 features")
        self.real_paths = _images_in(real_images, label)
        self.device = device
        try:
            self.network = torch.jit.load(str(path), map_location=device).eval()
        except RuntimeError as error:
            raise UnavailableError(
                f"{label}: {str(path)!r} is not a TorchScript file ({str(error).splitlines()[0]})."
            ) from error
        try:
            self._run([torch.zeros(1, 3, SIDE, SIDE)])
        except (RuntimeError, AttributeError) as error:  # it takes something else, or what it gives is no tensor
            raise UnavailableError(
                f"{label}: {str(path)!r} does not give features of {SIDE}×{SIDE} images "
                f"({str(error).strip().splitlines()[-1]})."
            ) from error
        assert real_images is not None
        self.source = f"{describe_file(path)}, {len(self.real_paths)} images of {real_images.name}"
        self._real: Tensor | None = None

    def scores(self, paths: Iterable[Path]) -> dict[str, float]:
        if self._real is None:
            self._real = self._features(self.real_paths)
        generated = self._features(paths)
        fewest = min(len(generated), len(self._real))
        if fewest < 2:
            raise UnavailableError(f"{' and '.join(self.names)}: at least two images are needed on either side.")
        found = {}
        for name in self.names:
            metric = _open(name, generated.shape[1], min(SUBSET, fewest))
            metric.update(self._real, real=True)
            metric.update(generated, real=False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # KID's subsets are random: the same run must give the same figure
                value = metric.compute()
            found[name] = max(0.0, float(value)) if name == "fid" else float(value[0])
        return found

    def _features(self, paths: Iterable[Path]) -> Tensor:
        every = list(paths)
        batches = [every[start : start + BATCH] for start in range(0, len(every), BATCH)]
        return torch.cat([self._run([_resized(path) for path in batch]) for batch in batches])

    @torch.no_grad()
    def _run(self, batch: list[Tensor]) -> Tensor:
        features: Tensor = self.network(torch.cat(batch).to(self.device))
        return features.flatten(1).float().cpu()  # [B, 2048]


def _resized(path: Path) -> Tensor:
    """[1, 3, 299, 299] from -1 to 1."""
    try:
        with Image.open(path) as image:
            pixels = to_pixels(image.convert("RGB"))
    except OSError as error:
        raise UnavailableError(f"FID and KID: the image {str(path)!r} cannot be read ({error}).") from error
    small = functional.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True)
    return small * 2 - 1


def _images_in(folder: Path | None, label: str) -> list[Path]:
    if folder is None:
        raise UnavailableError(f"{label}: give a folder of real images to compare with by --real-images.")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        raise UnavailableError(f"{label}: there are no images ({', '.join(ENDINGS)}) in {str(folder)!r}.")
    return paths


class _AsGiven(nn.Module):
    """Stands in for the network: the features are computed once, for both metrics."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def _open(name: str, num_features: int, subset: int) -> Any:
    network = _AsGiven(num_features)
    if name == "fid":
        return FrechetInceptionDistance(feature=network, sync_on_compute=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "will save all extracted features": that is how KID works
        return KernelInceptionDistance(feature=network, subset_size=subset, sync_on_compute=False)
