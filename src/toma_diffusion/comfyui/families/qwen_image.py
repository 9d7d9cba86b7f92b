"""QwenImageTransformer2DModel of ComfyUI: Qwen-Image and Qwen-Image-Edit. Reference images stay whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.comfyui.families.base import ComfyAdapter, patches, replaced_blocks, rounded_up
from toma_diffusion.engine.arguments import Given
from toma_diffusion.families import Call, Grid, PerToken, adds_residuals, around, first_blocks
from toma_diffusion.merge.block import Block, SiteSpec

POSITIONS = PerToken("image_rotary_emb", dims=(2,))
"""[batch, 1, tokens, channels / 2, 2, 2], for text, image and references."""
TIMES_APART = "index_timestep_zero"
"""The way of editing models in which references have a time of their own."""


class QwenImageAdapter(ComfyAdapter):
    """One stack of joint blocks. The image comes first in its stream, reference images after it."""

    model_class = "QwenImageTransformer2DModel"
    module_name = "comfy.ldm.qwen_image.model"
    supports = "QwenImageTransformer2DModel (Qwen-Image, Qwen-Image-Edit)"

    def skip_blocks(self, model: Any) -> tuple[int, ...]:
        """Select in every step, leave the first eighth of the blocks."""
        return first_blocks((len(model.transformer_blocks), 1 / 8))

    def blocks(self, model: Any) -> list[Block]:
        """The stack."""
        return [_describe(block, index) for index, block in enumerate(model.transformer_blocks)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the generated image."""
        sample, patch, references = given["x"], model.patch_size, given["ref_latents"] or ()
        layers = sample.shape[2]
        grid = Grid(*(rounded_up(side, patch) for side in sample.shape[-2:]))
        tokens = grid.num_tokens + sum(_tokens(each, patch) for each in references)
        method = given["ref_latents_method"] or model.default_ref_method
        replaced = replaced_blocks(given)
        patched = "another node patches the blocks (double_block)" if patches(given, "double_block") else None
        return Call(
            sample=sample,
            conditioning=given["context"],
            timestep=given["timestep"],
            grids={"joint": grid},
            image_at=-tokens,
            joint=True,
            block_by_block=adds_residuals(given, "control") or replaced or patched,
            blocks_left_alone=(
                "references are modulated by a time of their own" if references and method == TIMES_APART else None
            ),
            left_alone=f"the latent has {layers} layers, and only one is supported" if layers > 1 else None,
        )


def _tokens(latent: Tensor, patch: int) -> int:
    frames, height, width = latent.shape[-3:]
    return frames * rounded_up(height, patch) * rounded_up(width, patch)


def _describe(module: Any, index: int) -> Block:
    return Block(
        name=f"transformer_blocks.{index}",
        module=module,
        kind="joint",
        width=module.dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", POSITIONS)),
            SiteSpec("img_mlp", frozenset({"ff"}), around("img_mlp")),
        ),
        normalize=_before,
        per_token=(POSITIONS,),
        stream=1,
        writes_in_place=True,  # the model adds residuals of a ControlNet to what a block returns
    )


def _before(module: Any, given: Given) -> Tensor:
    shift, scale, _ = module.img_mod(given["temb"]).chunk(2, dim=-1)[0].unsqueeze(1).chunk(3, dim=-1)
    tokens: Tensor = module.img_norm1(given.tokens) * (1 + scale) + shift
    return tokens
