"""PixArtTransformer2DModel: PixArt-α and PixArt-Σ."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.adapters import _diffusers
from toma_diffusion.adapters.base import Adapter, Block, argument
from toma_diffusion.adapters.basic_block import describe_block
from toma_diffusion.core import Grid
from toma_diffusion.hooks.sites import Arguments, Keywords
from toma_diffusion.hooks.state import Call


class PixArtAdapter(Adapter):
    """One stack of BasicTransformerBlocks: one kind, one run. Positions are added before the first block."""

    supports = "PixArtTransformer2DModel (PixArt-α, PixArt-Σ)"

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is a PixArtTransformer2DModel."""
        return _diffusers.is_instance(model, "PixArtTransformer2DModel")

    def blocks(self, model: Any) -> list[Block]:
        """The stack."""
        return [
            describe_block(block, name=f"transformer_blocks.{index}", kind="block", run="transformer_blocks")
            for index, block in enumerate(model.transformer_blocks)
        ]

    def read_call(self, model: Any, args: Arguments, kwargs: Keywords) -> Call:
        """A token is a patch of the latent."""
        sample = argument("hidden_states", 0, args, kwargs)
        height, width = (side // model.config.patch_size for side in sample.shape[-2:])
        return Call(
            sample=sample,
            conditioning=argument("encoder_hidden_states", 1, args, kwargs),
            timestep=argument("timestep", 2, args, kwargs),
            grids={"block": Grid(height, width)},
        )
