"""CogVideoXTransformer3DModel: CogVideoX and CogVideoX 1.5, text to video and image to video."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block
from toma_diffusion.families.grids import grid_of_patches
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
"""None in models that add positions to the tokens."""


def _before(module: Any, given: Given) -> Tensor:
    """The norm takes the text as well."""
    tokens: Tensor = module.norm1(given.tokens, given["encoder_hidden_states"], given["temb"])[0]
    return tokens


class CogVideoX(Family):
    """One stack of joint blocks. Its MLP runs on text and video in one sequence, the text first."""

    model_class = "CogVideoXTransformer3DModel"
    supports = "CogVideoXTransformer3DModel (CogVideoX, CogVideoX 1.5)"
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(_before, ROTARY, attention=("attn1",), stream=0),
            left_whole=1 / 8,
        ),
    )

    def is_joint(self, model: Any) -> bool:
        """Only rotary positions are one table for all samples."""
        return bool(model.config.use_rotary_positional_embeddings)

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of a latent frame, or of several. Frames come before channels."""
        config = model.config
        frames, _, height, width = given["hidden_states"].shape[1:]
        patch = (config.patch_size_t or 1, config.patch_size, config.patch_size)
        grid = grid_of_patches((frames, height, width), patch)
        return self.call(model, given, grid, first_frame_apart=True)
