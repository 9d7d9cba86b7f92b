"""QwenImageTransformer2DModel: Qwen-Image and Qwen-Image-Edit (only the generated image is merged)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack, adds_residuals
from toma_diffusion.families.builders import joint_block
from toma_diffusion.families.grids import grid_from_shapes
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb", item=0)
"""A pair of tables, for the image and for the text."""
MODULATION = PerToken("modulate_index", dims=(1,))
"""Of editing models: which tokens are modulated by the time, and which as clean references."""
MASKS = (PerToken("joint_attention_kwargs.attention_mask", dims=(3,)), PerToken("attention_mask", dims=(3,)))
"""Of text and image, for padded prompts: in a block, in its attention. Later versions of diffusers than 0.38 make it in
attention itself."""


def _before(module: Any, given: Given) -> Tensor:
    modulation = module.img_mod(given["temb"]).chunk(2, dim=-1)[0]
    tokens: Tensor = module._modulate(module.img_norm1(given.tokens), modulation, given["modulate_index"])[0]
    return tokens


class QwenImage(Family):
    """One stack of joint blocks. The image comes first in its stream, reference images after it."""

    model_class = "QwenImageTransformer2DModel"
    supports = "QwenImageTransformer2DModel (Qwen-Image, Qwen-Image-Edit)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(_before, ROTARY, MODULATION, *MASKS, feed_forward="img_mlp"),
            left_whole=1 / 8,
        ),
    )

    def obstacle(self, model: Any) -> str | None:
        """Models of layered images have one."""
        if model.config.get("use_layer3d_rope"):
            return "Qwen-Image-Layered makes several layers of an image at once, which is not supported."
        return None

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the first image of every sample."""
        return self.call(
            model,
            given,
            grid_from_shapes([shapes[0] for shapes in given["img_shapes"]]),
            image_at=-given["hidden_states"].shape[1],
            block_by_block=adds_residuals(given, "controlnet_block_samples"),
        )
