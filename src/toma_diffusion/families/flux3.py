"""Flux3Transformer2DModel: FLUX.3, text to image. Reference images are not supported."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block, sequence_block
from toma_diffusion.families.modulation import shift_and_scale
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MODULATION = PerToken("image_rotary_emb"), PerToken("temb_mod", dims=(1,))
NORM = shift_and_scale("norm", "temb_mod")


class Flux3(Family):
    """Blocks on the image alone, then blocks on text and image. The blocks on the text alone are left alone.

    Attention and MLP run in parallel, on the same tokens.
    """

    model_class = "Flux3Transformer2DModel"
    supports = "Flux3Transformer2DModel (FLUX.3, without reference images)"
    one_table = True
    stacks = (
        Stack("mode_blocks.image", "image", sequence_block(NORM, ROTARY, MODULATION), left_whole=1 / 4),
        Stack("single_transformer_blocks", "joint", joint_block(NORM, ROTARY, MODULATION), left_whole=1 / 8),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        if given["image_cond_hidden_states"] is not None:
            raise UsageError(
                "FLUX.3 with reference images is not supported: generate without them, or call handle.remove() for it."
            )
        return self.call(model, given, self.ids.grid(given["img_ids"], given["hidden_states"].shape[1]))
