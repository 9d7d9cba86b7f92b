"""Metrics of clips: those of images, averaged over the frames, and flicker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from PIL.Image import Image
from torch import Tensor

from toma_lab.metrics.base import ImageMetric, Metric, Sample, to_pixels
from toma_lab.metrics.pixels import Psnr, pool_psnr

FRAMES_AT_ONCE = 8
"""More of 1280×720 pixels would take gigabytes."""


@dataclass(frozen=True)
class ClipSample:
    """One clip to score: frames in RGB."""

    frames: Sequence[Image]
    prompt: str
    reference: Sequence[Image] | None = None
    """The clip of the original model for the same prompt and seed. None for that clip itself."""


ClipMetric = Metric[ClipSample]


class OverFrames(ClipMetric):
    """A metric of images on every frame: the mean, and of PSNR that of the mean squared error of all frames.

    The mean of the decibels would be infinite as soon as one frame is equal, as the first one of an image-to-video
    pipeline may be.
    """

    def __init__(self, metric: ImageMetric) -> None:
        self.metric = metric
        self.name, self.source, self.needs_reference = metric.name, metric.source, metric.needs_reference
        self._average = pool_psnr if isinstance(metric, Psnr) else fmean

    def score(self, sample: ClipSample) -> float:
        references = [None] * len(sample.frames) if sample.reference is None else sample.reference
        pairs = list(zip(sample.frames, references, strict=True))
        values: list[float] = []
        for start in range(0, len(pairs), FRAMES_AT_ONCE):
            samples = [Sample(frame, sample.prompt, other) for frame, other in pairs[start : start + FRAMES_AT_ONCE]]
            values += self.metric.scores(samples)
        return self._average(values)


class Flicker(ClipMetric):
    """How much the changes from frame to frame differ from those of the reference. Lower is steadier.

    The mean over all pairs of neighbouring frames t, t + 1, all pixels and colours of

        |(frame[t + 1] − frame[t]) − (reference[t + 1] − reference[t])|

    of values from 0 to 255. It is 0 for equal clips, and for one that differs by the same picture in every frame.
    """

    name = "flicker"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    @torch.no_grad()
    def score(self, sample: ClipSample) -> float:
        assert sample.reference is not None
        changes, before = [], None
        for frame, other in zip(sample.frames, sample.reference, strict=True):
            pair = torch.stack([to_pixels(frame), to_pixels(other)]).to(self.device)  # [2, 1, 3, height, width]
            if before is not None:
                changes.append(flicker(*torch.cat([before, pair], dim=1)).item())
            before = pair
        return fmean(changes)


def flicker(frames: Tensor, references: Tensor) -> Tensor:
    """The same of pixels [..., frames, 3, height, width], 0 to 1."""
    return 255 * (frames - references).diff(dim=-4).abs().mean(dim=(-4, -3, -2, -1))
