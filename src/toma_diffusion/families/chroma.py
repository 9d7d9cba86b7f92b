"""ChromaTransformer2DModel: Chroma1."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack, adds_residuals
from toma_diffusion.families.builders import joint_block, single_block
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
MASKS = (PerToken("attention_mask", dims=(1,), ndim=2), PerToken("attention_mask", dims=(2, 3), ndim=4))
"""That of a block, of which it makes the one of queries and keys for its attention."""


def _before_joint(module: Any, given: Given) -> Tensor:
    """The first six rows of the time embedding are the image's."""
    tokens: Tensor = module.norm1(given.tokens, emb=given["temb"][:, :6])[0]
    return tokens


class Chroma(Family):
    """As Flux.1, from which Chroma was made, but with a mask over text and image, and single blocks on one sequence."""

    model_class = "ChromaTransformer2DModel"
    supports = "ChromaTransformer2DModel (Chroma1)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(_before_joint, ROTARY, *MASKS, image_outputs=(0, 2)),
            left_whole=1 / 4,
        ),
        Stack(
            "single_transformer_blocks",
            "single",
            single_block(modulating_norm("norm"), ROTARY, *MASKS, writes_in_place=True),  # a ControlNet's residuals
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        image_tokens = given["hidden_states"].shape[1]
        return self.call(
            model,
            given,
            self.ids.grid(given["img_ids"], image_tokens),
            image_at=-image_tokens,
            lengths={"single": given["encoder_hidden_states"].shape[1] + image_tokens},
            block_by_block=adds_residuals(given, "controlnet_block_samples", "controlnet_single_block_samples"),
        )
