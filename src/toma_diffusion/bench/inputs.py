"""Inputs for a denoiser: random tensors in the shapes that its pipeline would pass, for every family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LATENT_FACTOR = 8
"""Pixels per latent in all supported families."""
TIME_IDS = 6
"""SDXL gets six numbers: the original size, the corner of the crop and the target size."""


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


Build = Callable[[Mapping[str, Any], Request, RandomTensors], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How the denoisers of one class are called."""

    sample: str
    """The argument that is the noisy image."""
    multiple: int
    """Sides of an image must be multiples of this."""
    text_tokens: int
    is_guided: bool
    """Whether half of the batch is the unconditional half of classifier-free guidance."""
    build: Build


def _unet(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    inputs: dict[str, Any] = {
        "sample": random(batch, config["in_channels"], *size),
        "timestep": random.constant(500, dtype=torch.int64),
        "encoder_hidden_states": random(batch, request.text_tokens, config["cross_attention_dim"]),
    }
    if config["addition_embed_type"] == "text_time":
        inputs["timestep"] = random.constant(500, dtype=torch.float32)  # SDXL's scheduler has no whole numbers
        pooled = config["projection_class_embeddings_input_dim"] - TIME_IDS * config["addition_time_embed_dim"]
        sizes = (request.height, request.width, 0, 0, request.height, request.width)
        time_ids = torch.tensor(sizes, device=random.device, dtype=random.dtype).expand(batch, -1)
        inputs["added_cond_kwargs"] = {"text_embeds": random(batch, pooled), "time_ids": time_ids.contiguous()}
    return inputs


def _flux(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    height, width = (side // (2 * LATENT_FACTOR) for side in (request.height, request.width))  # latents come 2×2 packed
    ids = torch.zeros(height, width, 3)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None]
    inputs = {
        "hidden_states": random(batch, height * width, config["in_channels"]),
        "encoder_hidden_states": random(batch, request.text_tokens, config["joint_attention_dim"]),
        "pooled_projections": random(batch, config["pooled_projection_dim"]),
        "timestep": random.constant(0.5, batch),
        "img_ids": ids.reshape(-1, 3).to(random.device, random.dtype),
        "txt_ids": random.constant(0, request.text_tokens, 3),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = random.constant(3.5, batch, dtype=torch.float32)
    return inputs


def _sd3(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    return {
        "hidden_states": random(request.batch, config["in_channels"], *size),
        "encoder_hidden_states": random(request.batch, request.text_tokens, config["joint_attention_dim"]),
        "pooled_projections": random(request.batch, config["pooled_projection_dim"]),
        "timestep": random.constant(500, request.batch),
    }


def _pixart(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if config["use_additional_conditions"] or (config["use_additional_conditions"] is None and size == (128, 128)):
        conditions = {
            "resolution": random(batch, 2),
            "aspect_ratio": random.constant(request.height / request.width, batch, 1),
        }
    return {
        "hidden_states": random(batch, config["in_channels"], *size),
        "encoder_hidden_states": random(batch, request.text_tokens, config["caption_channels"]),
        "timestep": random.constant(500, batch, dtype=torch.int64),
        "added_cond_kwargs": conditions,
    }


FAMILIES: Mapping[str, Family] = {
    "UNet2DConditionModel": Family("sample", LATENT_FACTOR, 77, True, _unet),
    "FluxTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _flux),
    "SD3Transformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 333, True, _sd3),
    "PixArtTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 300, True, _pixart),
}
"""By the name of the model class."""
