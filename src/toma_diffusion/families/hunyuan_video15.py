"""HunyuanVideo15Transformer3DModel: HunyuanVideo 1.5, text to video and image to video."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = (PerToken("freqs_cis"), PerToken("image_rotary_emb"))
"""A block calls it otherwise than its attention."""


class HunyuanVideo15(Family):
    """One stack of joint blocks. The mask is that of the text; attention makes one of all tokens of it, merged or not.

    The text stream holds the tokens of two text encoders and of the given image.
    """

    model_class = "HunyuanVideo15Transformer3DModel"
    supports = "HunyuanVideo15Transformer3DModel (HunyuanVideo 1.5)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks", "joint", joint_block(modulating_norm("norm1"), *ROTARY, stream=0), left_whole=1 / 8
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        config = model.config
        patch = (config.patch_size_t, config.patch_size, config.patch_size)
        grid = grid_of_patches(given["hidden_states"].shape[-3:], patch)
        return self.call(model, given, grid, first_frame_apart=True)
