"""Denoisers to time: the published models with random weights, at real size or smaller; or loaded ones.

Speed does not depend on the weights, so nothing has to be downloaded to time a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toma_diffusion.api import find_denoiser
from toma_diffusion.errors import UsageError
from toma_lab.bench.clip_inputs import CLIP_PIPELINES
from toma_lab.bench.inputs import FAMILIES
from toma_lab.bench.published import MODELS, UNET, ClipSize
from toma_lab.bench.requests import Family, RandomTensors, Request
from toma_lab.bench.weights import SEED, build_empty, fill
from toma_lab.pipelines.checkpoints import DEMO_MODELS, can_be_opened, half_precision, open_pipeline

SMALL_TEXT_TOKENS = 77
LARGE = 5_000_000_000
"""Parameters of a model whose steps take a tenth of a second or more on any GPU."""


@dataclass(eq=False)
class Denoiser:
    """A model to time, and how to call it."""

    name: str
    """As in the rows."""
    model: nn.Module
    family: Family
    device: torch.device
    dtype: torch.dtype
    text_tokens: int
    default_batch: int
    default_resolution: int
    default_clip: ClipSize | None = None
    """Of a model of clips, in place of the resolution."""
    pipeline: Any = None
    """The pipeline that the model was loaded with, if it was loaded."""
    _has_weights: bool = field(default=False, repr=False)

    @property
    def config(self) -> Any:
        """The model's own settings, by name."""
        return self.model.config

    @property
    def is_large(self) -> bool:
        """Whether a GPU is busy with one call for so long that the CPU is always ahead of it."""
        return sum(parameter.numel() for parameter in self.model.parameters()) >= LARGE

    @property
    def default_size(self) -> str:
        """Width × height, or one number if they are equal."""
        return str(self.default_resolution) if self.default_clip is None else "{}x{}".format(*self.default_clip[:2])

    def frames_of(self, frames: int | None) -> int | None:
        """How many a clip has, if the user asks for so many; None of a model of images."""
        if self.default_clip is None or self.family.frame_groups is None:
            if frames is not None:
                raise UsageError(
                    f"frames={frames} is for models of clips, and {self.name!r} makes images: leave it out."
                )
            return None
        chosen = self.default_clip[2] if frames is None else frames
        self.family.frame_groups.latents(chosen)  # raises if it cannot have that many
        return chosen

    def materialize(self) -> None:
        """Give the model its weights, on the device. Until then it takes no memory."""
        if self._has_weights:
            return
        if self.pipeline is None:
            fill(self.model, self.device, self.dtype)
        else:
            self.model.to(self.device)
        if self.device.type == "cuda" and self.family is FAMILIES[UNET]:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._has_weights = True

    def inputs(self, batch: int, width: int, height: int, frames: int | None = None) -> dict[str, Any]:
        """Keyword arguments for one call."""
        random = RandomTensors(self.device, self.dtype, torch.Generator().manual_seed(SEED))
        request = Request(batch, height, width, self.text_tokens, self.frames_of(frames))
        return self.family.build(self.config, request, random)


def build(name: str, *, small: bool, device: torch.device, dtype: torch.dtype | None = None) -> Denoiser:
    """A model known by name, without weights as yet."""
    published = MODELS[name]
    family = FAMILIES[published.class_name]
    return Denoiser(
        name=f"{name}-small" if small else name,
        model=build_empty(published.class_name, {**published.config, **(published.small if small else {})}),
        family=family,
        device=device,
        dtype=dtype or (torch.float32 if device.type == "cpu" else half_precision(published.class_name)),
        text_tokens=min(SMALL_TEXT_TOKENS, family.text_tokens) if small else family.text_tokens,
        default_batch=published.batch,
        default_resolution=published.small_resolution if small else published.resolution,
        default_clip=published.small_clip if small else published.clip,
    )


def load(source: str, *, device: torch.device, dtype: torch.dtype | None = None) -> Denoiser:
    """The denoiser of a checkpoint, from wherever `open_pipeline` finds it."""
    if not can_be_opened(source):
        raise UsageError(
            f"model {source!r} is not known: use one of {', '.join((*MODELS, *DEMO_MODELS))}, a folder with a "
            "diffusers pipeline, a .safetensors file, or an id of the hub such as owner/name."
        )
    pipeline: Any = open_pipeline(source, torch.float32 if dtype is None and device.type == "cpu" else dtype)
    model = find_denoiser(pipeline).eval().requires_grad_(False)
    if type(model).__name__ not in FAMILIES:
        raise UsageError(
            f"model {source!r} has a denoiser of the class {type(model).__name__}, for which no inputs are known: "
            f"use one of {', '.join(FAMILIES)}."
        )
    family = CLIP_PIPELINES.get(type(pipeline).__name__, FAMILIES[type(model).__name__])
    side: Any = getattr(model.config, "sample_size", None)
    return Denoiser(
        name=Path(source).resolve().name if Path(source).exists() else source,
        model=model,
        family=family,
        device=device,
        dtype=pipeline.dtype,
        text_tokens=family.text_tokens,
        default_batch=2 if family.is_guided else 1,
        default_resolution=side * 8 if isinstance(side, int) else 1024,
        default_clip=_usual_clip(pipeline) if family.frame_groups else None,
        pipeline=pipeline,
    )


def _usual_clip(pipeline: Any) -> ClipSize:
    """The defaults of the pipeline's call, or what most have."""
    taken = signature(pipeline.__call__).parameters
    usual = (("width", 832), ("height", 480), ("num_frames", 121))
    width, height, frames = (getattr(taken.get(name), "default", None) or other for name, other in usual)
    return width, height, frames
