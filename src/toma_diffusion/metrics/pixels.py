"""How far an image is from its reference, pixel by pixel: MSE, PSNR, SSIM."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log10
from statistics import fmean

from torchmetrics.functional import mean_squared_error
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from toma_diffusion.metrics.base import ImageMetric, Sample


class Mse(ImageMetric):
    """Mean squared error of values from 0 to 255, the scale of the paper's tables. Lower is nearer."""

    name = "mse"

    def score(self, sample: Sample) -> float:
        """0 for equal images."""
        return float(mean_squared_error(sample.pixels * 255, sample.reference_pixels * 255))


class Psnr(ImageMetric):
    """Peak signal-to-noise ratio in dB. Higher is nearer."""

    name = "psnr"

    def score(self, sample: Sample) -> float:
        """Infinite for equal images."""
        return float(peak_signal_noise_ratio(sample.pixels, sample.reference_pixels, data_range=1.0))


def pool_psnr(values: Sequence[float]) -> float:
    """One PSNR for several images: that of the mean of their squared errors.

    The mean of the decibels would be infinite as soon as one image is equal to its reference; a safety checker that
    blackens both is enough.
    """
    error = fmean(10 ** (-value / 10) for value in values)
    return -10 * log10(error) if error else inf


class Ssim(ImageMetric):
    """Structural similarity, Gaussian windows of 11 pixels. Higher is nearer."""

    name = "ssim"

    def score(self, sample: Sample) -> float:
        """1 for equal images."""
        found = structural_similarity_index_measure(sample.pixels, sample.reference_pixels, data_range=1.0)
        assert not isinstance(found, tuple)  # which only other options than ours return
        return float(found)
