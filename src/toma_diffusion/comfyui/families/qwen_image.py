"""QwenImageTransformer2DModel of ComfyUI: Qwen-Image and Qwen-Image-Edit. Reference images stay whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.comfyui.families.base import (
    ComfyFamily,
    block_builder,
    patches,
    replaced_blocks,
    rounded_up,
)
from toma_diffusion.families import Call, Given, Grid, PerToken, Stack, adds_residuals, site

POSITIONS = PerToken("image_rotary_emb", dims=(2,))
"""[batch, 1, tokens, channels / 2, 2, 2], for text, image and references."""
TIMES_APART = "index_timestep_zero"
"""The way of editing models in which references have a time of their own."""


def _before(module: Any, given: Given) -> Tensor:
    shift, scale, _ = module.img_mod(given["temb"]).chunk(2, dim=-1)[0].unsqueeze(1).chunk(3, dim=-1)
    tokens: Tensor = module.img_norm1(given.tokens) * (1 + scale) + shift
    return tokens


class QwenImage(ComfyFamily):
    """One stack of joint blocks. The image comes first in its stream, reference images after it."""

    model_class = "QwenImageTransformer2DModel"
    module_name = "comfy.ldm.qwen_image.model"
    supports = "QwenImageTransformer2DModel (Qwen-Image, Qwen-Image-Edit)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            block_builder(
                "dim",
                sites=(site("attn", "attn", POSITIONS), site("ff", "img_mlp")),
                normalize=_before,
                per_token=(POSITIONS,),
                stream=1,
                writes_in_place=True,  # the model adds residuals of a ControlNet to what a block returns
            ),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the generated image."""
        patch, references = model.patch_size, given["ref_latents"] or ()
        layers, height, width = given["x"].shape[2:]
        grid = Grid(rounded_up(height, patch), rounded_up(width, patch))
        tokens = grid.num_tokens + sum(_tokens(each, patch) for each in references)
        method = given["ref_latents_method"] or model.default_ref_method
        patched = "another node patches the blocks (double_block)" if patches(given, "double_block") else None
        return self.call(
            model,
            given,
            grid,
            image_at=-tokens,
            block_by_block=adds_residuals(given, "control") or replaced_blocks(given) or patched,
            blocks_left_whole=(
                "references are modulated by a time of their own" if references and method == TIMES_APART else None
            ),
            left_whole=f"the latent has {layers} layers, and only one is supported" if layers > 1 else None,
        )


def _tokens(latent: Tensor, patch: int) -> int:
    frames, height, width = latent.shape[-3:]
    return frames * rounded_up(height, patch) * rounded_up(width, patch)
