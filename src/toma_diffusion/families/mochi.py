"""MochiTransformer3DModel: Mochi 1."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
"""[tokens, heads, channels]: one for every sample, [batch, tokens, heads, channels], works as well."""


class Mochi(Family):
    """One stack of joint blocks. The last does not change the text."""

    model_class = "MochiTransformer3DModel"
    supports = "MochiTransformer3DModel (Mochi 1)"
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(modulating_norm("norm1"), ROTARY, attention=("attn1",), stream=0),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        patch = model.config.patch_size
        grid = grid_of_patches(given["hidden_states"].shape[-3:], (1, patch, patch))
        return self.call(model, given, grid, first_frame_apart=True)
