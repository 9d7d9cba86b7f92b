"""Denoisers with the configurations of the published models and random weights, at real size or smaller; or loaded.

Speed does not depend on the weights, so nothing has to be downloaded to time a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toma_diffusion.api import find_denoiser
from toma_diffusion.bench.inputs import FAMILIES, Family, RandomTensors, Request
from toma_diffusion.errors import UsageError
from toma_diffusion.pipelines.checkpoints import DEMO_MODELS, can_be_opened, half_precision, open_pipeline

SEED = 0
WEIGHT_SCALE = 0.02
"""Standard deviation of the random weights; activations then stay finite in half precision."""
SMALL_TEXT_TOKENS = 77


@dataclass(frozen=True)
class Published:
    """One of the models known by name."""

    class_name: str
    config: Mapping[str, Any]
    """The settings of the published checkpoint that differ from the class's defaults."""
    small: Mapping[str, Any]
    """Changes for a small model of the same structure, for CPUs."""
    batch: int
    """Batch size of one call: 2 if the pipeline puts both halves of classifier-free guidance into one call."""
    resolution: int
    small_resolution: int


SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
SMALL_SDXL = {
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 4),
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
}
SMALL_SD15 = {
    "block_out_channels": (32, 64, 128, 128),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 64,
}
# Six and ten blocks, because the first five of each kind are left alone by default.
SMALL_FLUX = {
    "num_layers": 6,
    "num_single_layers": 10,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
SD35_LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
SMALL_SD35 = {
    "num_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 64,
}
UNET, FLUX, SD3 = "UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel"
MODELS: Mapping[str, Published] = {
    "sdxl": Published(UNET, SDXL, SMALL_SDXL, batch=2, resolution=1024, small_resolution=512),
    "sd15": Published(
        UNET, {"sample_size": 64, "cross_attention_dim": 768}, SMALL_SD15, batch=2, resolution=512, small_resolution=256
    ),
    "flux": Published(FLUX, {"guidance_embeds": True}, SMALL_FLUX, batch=1, resolution=1024, small_resolution=256),
    "sd35": Published(SD3, SD35_LARGE, SMALL_SD35, batch=2, resolution=1024, small_resolution=256),
}


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
    pipeline: Any = None
    """The pipeline that the model was loaded with, if it was loaded."""
    _has_weights: bool = field(default=False, repr=False)

    @property
    def config(self) -> Any:
        """The model's own settings, by name."""
        return self.model.config

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

    def inputs(self, batch: int, width: int, height: int) -> dict[str, Any]:
        """Keyword arguments for one call."""
        random = RandomTensors(self.device, self.dtype, torch.Generator().manual_seed(SEED))
        return self.family.build(self.config, Request(batch, height, width, self.text_tokens), random)


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
    family = FAMILIES[type(model).__name__]
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
        pipeline=pipeline,
    )


def build_empty(class_name: str, config: Mapping[str, Any]) -> nn.Module:
    """A diffusers model on the `meta` device: its structure, without memory for the weights."""
    import diffusers

    with torch.device("meta"):
        model: nn.Module = getattr(diffusers, class_name)(**config)
    return model.eval().requires_grad_(False)


def fill(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the weights of a model on the `meta` device, and fill them with the same random numbers every time."""
    nn.Module.to(model, dtype).to_empty(device=device)  # diffusers' own `to` warns of weights that it has none of
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, WEIGHT_SCALE, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
                parameter.add_(1)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.normal_(0, WEIGHT_SCALE, generator=generator)
            else:  # the position ids of text encoders
                buffer.copy_(torch.arange(buffer.numel()).view_as(buffer))
