"""PixArtTransformer2DModel: PixArt-α and PixArt-Σ."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import unet_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.families.modulation import from_table
from toma_diffusion.merge.state import Call


class PixArt(Family):
    """One stack of BasicTransformerBlocks. Positions are added before the first block."""

    model_class = "PixArtTransformer2DModel"
    supports = "PixArtTransformer2DModel (PixArt-α, PixArt-Σ)"
    stacks = (Stack("transformer_blocks", "block", unet_block(from_table(time="timestep"))),)

    def read_call(self, model: Any, given: Given) -> Call:
        grid = grid_of_patches(given["hidden_states"].shape[-2:], 2 * [model.config.patch_size])
        return self.call(model, given, grid)
