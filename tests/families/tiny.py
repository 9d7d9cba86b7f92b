"""Tiny real models of every family, built from configs: no download, no mock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from diffusers import (
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from torch import nn

from toma_diffusion import Merge

SETTINGS = {"ratio": 0.5, "num_regions": 4, "skip_blocks": ()}
"""Small regions for small grids, and no block left alone."""
ONE_PLAN = SETTINGS | {"share": "plan", "guidance_parts": 1}
"""One plan for a kind of block and a pass, as in the paper: what is computed in a step is easily counted."""
STRIDED = SETTINGS | {"selection": "strided"}
"""For comparisons that allow for rounding: rounding may turn a greedy choice."""
PLAIN = Merge()
"""What merges if nothing is set."""


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def sd15_unet(**changes) -> nn.Module:
    settings = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    }
    return seeded(lambda: UNet2DConditionModel(**settings | changes))


def sdxl_unet(**changes) -> nn.Module:
    settings = {
        "sample_size": 32,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 64,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    return seeded(lambda: UNet2DConditionModel(**settings | changes))


def flux_transformer(**changes) -> nn.Module:
    settings = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }
    return seeded(lambda: FluxTransformer2DModel(**settings | changes))


def sd3_transformer(**changes) -> nn.Module:
    settings = {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "out_channels": 4,
        "pos_embed_max_size": 96,
        "dual_attention_layers": (0, 1),
        "qk_norm": "rms_norm",
    }
    return seeded(lambda: SD3Transformer2DModel(**settings | changes))


def pixart_transformer(**changes) -> nn.Module:
    settings = {
        "sample_size": 16,
        "num_layers": 3,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "in_channels": 4,
        "cross_attention_dim": 32,
        "out_channels": 8,
        "caption_channels": 32,
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
    }
    return seeded(lambda: PixArtTransformer2DModel(**settings | changes))


def flux_ids(height: int, width: int, first: int = 0) -> torch.Tensor:
    ids = torch.zeros(height, width, 3)
    ids[..., 0] = first
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None]
    return ids.reshape(-1, 3)


def unet_inputs(width: int = 32, **extra) -> Callable[..., dict]:
    def inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
        generator = torch.Generator().manual_seed(seed)
        return {
            "sample": torch.randn(batch, 4, height, wide, generator=generator),
            "timestep": torch.tensor(10),
            "encoder_hidden_states": torch.randn(batch, 7, width, generator=generator),
            **{name: value(batch, generator) for name, value in extra.items()},
        }

    return inputs


def sdxl_conditions(batch: int, generator: torch.Generator) -> dict:
    return {
        "text_embeds": torch.randn(batch, 32, generator=generator),
        "time_ids": torch.randn(batch, 6, generator=generator),
    }


def flux_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, height * wide, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": flux_ids(height, wide),
        "txt_ids": torch.zeros(6, 3),
    }


def sd3_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, wide, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 64, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }


def pixart_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, wide, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


@dataclass(frozen=True)
class Family:
    """A model family: how to build a tiny one and how to call it."""

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[..., dict]
    """batch, height and wide of the latent, seed."""
    kinds: int
    """Plans in use: kinds of blocks."""
    odd: tuple[tuple[int, int], ...] = field(default=((12, 20), (10, 14)))
    """Latent sizes that are not square or not powers of two."""

    shallow: dict = field(default_factory=dict, hash=False)
    """Changes of the configuration that leave few layers but every kind of block: compiling a whole model takes
    seconds a layer."""
    missing: str = ""
    """Why it cannot be built here, if so. Its tests are then skipped, with this reason."""

    def call(self, model: nn.Module, **arguments) -> torch.Tensor:
        return output_of(model, in_dtype(self.inputs(**arguments), model.dtype))


def output_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Z-Image returns a list of pictures."""
    with torch.no_grad():
        output = model(**inputs, return_dict=False)[0]
    return torch.stack(output) if isinstance(output, list) else output


def with_sample(inputs: dict, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    """The same inputs with another noisy sample. Z-Image takes a list of pictures."""
    name = next(name for name in ("sample", "hidden_states", "x") if name in inputs)
    sample = inputs[name]
    return inputs | {name: [change(each) for each in sample] if isinstance(sample, list) else change(sample)}


EXACT = ("timestep", "t", "img_ids", "txt_ids", "position_ids")


def in_dtype(inputs: dict, dtype: torch.dtype) -> dict:
    """Positions and times stay exact, as pipelines keep them."""

    def convert(value):
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {key: value if key in EXACT else convert(value) for key, value in inputs.items()}


FAMILIES = [
    Family(
        "sd15",
        sd15_unet,
        unet_inputs(32),
        kinds=2,
        odd=((12, 20), (13, 17), (10, 14)),
        shallow={"up_block_types": ("UpBlock2D", "UpBlock2D")},
    ),
    Family(
        "sdxl",
        sdxl_unet,
        unet_inputs(64, added_cond_kwargs=sdxl_conditions),
        kinds=1,
        odd=((24, 40), (25, 31)),
        shallow={
            "block_out_channels": (32,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "up_block_types": ("UpBlock2D",),
            "mid_block_type": None,
            "transformer_layers_per_block": 2,
            "attention_head_dim": 2,
        },
    ),
    Family(
        "flux",
        flux_transformer,
        flux_inputs,
        kinds=2,
        odd=((6, 10), (9, 7)),
        shallow={"num_layers": 1, "num_single_layers": 2},
    ),
    Family("sd3", sd3_transformer, sd3_inputs, kinds=1, shallow={"num_layers": 2, "dual_attention_layers": (0,)}),
    Family("pixart", pixart_transformer, pixart_inputs, kinds=1, shallow={"num_layers": 2}),
]
SCOPES = ("module", "block", "stage")
