"""PixArtTransformer2DModel: PixArt-α and PixArt-Σ."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, Block
from toma_diffusion.families.basic_block import describe_block
from toma_diffusion.merge import Grid
from toma_diffusion.merge.state import Call


class PixArtAdapter(Adapter):
    """One stack of BasicTransformerBlocks: one kind, one run. Positions are added before the first block."""

    model_class = "PixArtTransformer2DModel"
    supports = "PixArtTransformer2DModel (PixArt-α, PixArt-Σ)"

    def blocks(self, model: Any) -> list[Block]:
        """The stack."""
        return [
            describe_block(block, name=f"transformer_blocks.{index}", kind="block", run="transformer_blocks")
            for index, block in enumerate(model.transformer_blocks)
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of the latent."""
        sample = given["hidden_states"]
        height, width = (side // model.config.patch_size for side in sample.shape[-2:])
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"block": Grid(height, width)},
        )
