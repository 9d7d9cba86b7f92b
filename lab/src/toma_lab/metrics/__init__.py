"""How good an image or a clip is, and how close to another. One family of metrics per file; imported only when used."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from toma_diffusion.errors import UsageError
from toma_lab.metrics.base import ImageMetric, JointMetric, Sample, UnavailableError
from toma_lab.metrics.clips import ClipMetric, ClipSample, Flicker, OverFrames
from toma_lab.metrics.features import CLIP, DINO, ClipT, Dino
from toma_lab.metrics.inception import Inception
from toma_lab.metrics.lpips import Lpips
from toma_lab.metrics.pixels import Mse, Psnr, Ssim

__all__ = [
    "CLIP_METRICS",
    "IMAGE_METRICS",
    "JOINT_METRICS",
    "METRICS",
    "ClipMetric",
    "ClipSample",
    "ImageMetric",
    "JointMetric",
    "MetricSet",
    "Sample",
    "UnavailableError",
    "Weights",
    "check_names",
    "open_metrics",
]

IMAGE_METRICS = ("mse", "psnr", "ssim", "lpips", "dino", "clip_t")
CLIP_METRICS = ("flicker",)
"""Of clips only. Those of images are averaged over the frames."""
JOINT_METRICS = ("fid", "kid")
"""Of images only."""
METRICS = (*IMAGE_METRICS, *CLIP_METRICS, *JOINT_METRICS)


@dataclass(frozen=True)
class Weights:
    """Files and models that some metrics need."""

    lpips: Path | None = None
    """A .safetensors file."""
    inception: Path | None = None
    """A TorchScript file."""
    real_images: Path | None = None
    """A folder, searched recursively."""
    dino: str = DINO
    """A local folder or a hub id, like `clip`."""
    clip: str = CLIP


@dataclass
class MetricSet:
    """The metrics that can be computed here, and the reasons why others cannot."""

    image: list[ImageMetric] = field(default_factory=list)
    clip: list[ClipMetric] = field(default_factory=list)
    """In place of the others, if clips are scored."""
    joint: list[JointMetric] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """One sentence for each requested metric that is not available."""

    def source_of(self, name: str) -> str:
        """Name and hash of the weights of a metric of images or clips. Empty if it has none, or is not available."""
        every: list[ImageMetric | ClipMetric] = [*self.image, *self.clip]
        return next((metric.source for metric in every if metric.name == name), "")


def check_names(names: Iterable[str]) -> None:
    """Raise `UsageError` if one is not known."""
    for name in names:
        if name not in METRICS:
            raise UsageError(f"metric {name!r} is not known: use some of {', '.join(METRICS)}.")


def open_metrics(names: Iterable[str], weights: Weights, device: torch.device, *, clips: bool = False) -> MetricSet:
    """Load the metrics, of images or of clips. One that cannot be loaded is listed in `missing`."""
    wanted = list(dict.fromkeys(names))
    check_names(wanted)
    openers: dict[str, Callable[[], ImageMetric]] = {
        "mse": lambda: Mse(device),
        "psnr": lambda: Psnr(device),
        "ssim": lambda: Ssim(device),
        "lpips": lambda: Lpips(weights.lpips, device),
        "dino": lambda: Dino(weights.dino, device),
        "clip_t": lambda: ClipT(weights.clip, device),
    }
    found = MetricSet()
    for name in wanted:
        try:
            if name in openers:
                found.image.append(openers[name]())
            elif name in CLIP_METRICS and not clips:
                found.missing.append(f"{name}: it compares the frames of clips, and these are images.")
        except UnavailableError as error:
            found.missing.append(str(error))
    joint = [name for name in wanted if name in JOINT_METRICS]
    if clips:
        found.clip = [OverFrames(metric) for metric in found.image]
        found.clip += [Flicker(device)] if "flicker" in wanted else []
        found.image = []
    if joint and clips:
        found.missing.append(f"{' and '.join(joint)}: they compare single images with real ones, not clips.")
    elif joint:
        try:
            found.joint.append(Inception(joint, weights.inception, weights.real_images, device))
        except UnavailableError as error:
            found.missing.append(str(error))
    return found
