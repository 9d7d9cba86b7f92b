"""How far an image is from its reference, pixel by pixel: MSE, PSNR, SSIM."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log10
from statistics import fmean

from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from toma_lab.metrics.base import PairMetric


class Mse(PairMetric):
    """Mean squared error of values from 0 to 255, the scale of the paper's tables. Lower is nearer."""

    name = "mse"

    def distances(self, images: Tensor, references: Tensor) -> Tensor:
        return (255 * (images - references)).square().mean(dim=(1, 2, 3))


class Psnr(PairMetric):
    """Peak signal-to-noise ratio in dB. Higher is nearer, infinite for equal images."""

    name = "psnr"

    def distances(self, images: Tensor, references: Tensor) -> Tensor:
        return peak_signal_noise_ratio(images, references, data_range=1.0, reduction="none", dim=(1, 2, 3))


def pool_psnr(values: Sequence[float]) -> float:
    """One PSNR for several images: that of the mean of their squared errors.

    The mean of the decibels would be infinite as soon as one image is equal to its reference; a safety checker that
    blackens both is enough.
    """
    error = fmean(10 ** (-value / 10) for value in values)
    return -10 * log10(error) if error else inf


class Ssim(PairMetric):
    """Structural similarity, Gaussian windows of 11 pixels. Higher is nearer, 1 for equal images."""

    name = "ssim"

    def distances(self, images: Tensor, references: Tensor) -> Tensor:
        found = structural_similarity_index_measure(images, references, data_range=1.0, reduction="none")
        assert not isinstance(found, tuple)  # which only other options than ours return
        return found
