"""FluxTransformer2DModel: Flux.1 dev, schnell, Fill, Control and Kontext (only the generated image is merged)."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack, adds_residuals
from toma_diffusion.families.builders import joint_block, single_block
from toma_diffusion.families.modulation import modulating_norm
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
LEFT_WHOLE = 5
"""The paper does not merge the first 10 of 57 blocks, in which text and image are combined: 5 joint, 5 single ones."""


class Flux(Family):
    """Joint blocks, then single blocks. A merged token has the RoPE row of its destination. Text is never merged."""

    model_class = "FluxTransformer2DModel"
    supports = "FluxTransformer2DModel (Flux.1 dev, schnell, Fill, Control, Kontext)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            # Attention returns image, text and, with an IP-Adapter, its contribution to the image.
            joint_block(modulating_norm("norm1"), ROTARY, image_outputs=(0, 2)),
            LEFT_WHOLE,
        ),
        Stack(
            "single_transformer_blocks", "single", single_block(modulating_norm("norm"), ROTARY, stream=1), LEFT_WHOLE
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        image_tokens = given["hidden_states"].shape[1]
        return self.call(
            model,
            given,
            self.ids.grid(given["img_ids"], image_tokens),
            image_at=-image_tokens,
            block_by_block=adds_residuals(given, "controlnet_block_samples", "controlnet_single_block_samples"),
        )
