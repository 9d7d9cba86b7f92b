"""What a denoiser is asked for in one call, and how the denoisers of a class are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError

LATENT_FACTOR = 8
"""Pixels per latent in all families of images, and in Wan."""
PROMPT_TOKENS, EMPTY_PROMPT_TOKENS = 128, 8
"""A prompt of some eighty words, and an empty one with its template, where pipelines do not pad all to one length."""


@dataclass(frozen=True)
class RandomTensors:
    """Random tensors for one denoiser. The same in every run: the numbers come from a generator of their own."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def constant(self, value: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One number everywhere."""
        return torch.full(shape, value, device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True)
class Request:
    """What one call is to be about."""

    batch: int
    height: int
    """In pixels, as `width`."""
    width: int
    text_tokens: int
    frames: int | None = None
    """Of a clip, as it is decoded."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, where latents come 2×2 packed."""
        return self.height // (2 * LATENT_FACTOR), self.width // (2 * LATENT_FACTOR)

    @property
    def tokens(self) -> int:
        """How many tokens this grid has."""
        return math.prod(self.grid)


Build = Callable[[Mapping[str, Any], Request, RandomTensors], dict[str, Any]]


@dataclass(frozen=True)
class FrameGroups:
    """How a decoder makes frames of latent ones: `first` frames of the first latents, `step` of each group after."""

    step: int
    first: int = 1
    latents_of_step: int = 1
    latents_of_first: int = 1

    def latents(self, frames: int | None) -> int:
        """How many latent frames a clip of that many has."""
        groups, left = divmod((frames or 0) - self.first, self.step)
        if groups < 0 or left:
            raise UsageError(
                f"frames={frames} is not allowed: this model makes {self.first}, {self.first + self.step}, "
                f"{self.first + 2 * self.step}, … ({self.step}·n + {self.first})."
            )
        return self.latents_of_first + groups * self.latents_of_step


@dataclass(frozen=True)
class Family:
    """How the denoisers of one class are called."""

    sample: str
    """The argument that is the noisy image, or a list of such."""
    multiple: int
    """Sides of an image must be multiples of this."""
    text_tokens: int
    is_guided: bool
    """Whether half of the batch is the unconditional half of classifier-free guidance."""
    build: Build
    frame_groups: FrameGroups | None = None
    """Of a model of clips."""
