"""SD3Transformer2DModel: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack, adds_residuals
from toma_diffusion.families.builders import joint_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.state import Call


class SD3(Family):
    """One stack of joint blocks. Some have a second, image-only attention; the last returns no text."""

    model_class = "SD3Transformer2DModel"
    supports = "SD3Transformer2DModel (Stable Diffusion 3, 3.5)"
    stacks = (Stack("transformer_blocks", "joint", joint_block(modulating_norm("norm1"), attention=("attn", "attn2"))),)

    def read_call(self, model: Any, given: Given) -> Call:
        grid = grid_of_patches(given["hidden_states"].shape[-2:], 2 * [model.config.patch_size])
        skipped = "skip-layer guidance leaves out blocks" if given["skip_layers"] else None
        residuals = adds_residuals(given, "block_controlnet_hidden_states")
        return self.call(model, given, grid, block_by_block=residuals or skipped)
