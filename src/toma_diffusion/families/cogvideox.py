"""CogVideoXTransformer3DModel: CogVideoX and CogVideoX 1.5, text to video and image to video."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
"""None in models that add positions to the tokens."""


class CogVideoXAdapter(Adapter):
    """One stack of joint blocks. Its MLP runs on text and video in one sequence, the text first."""

    model_class = "CogVideoXTransformer3DModel"
    supports = "CogVideoXTransformer3DModel (CogVideoX, CogVideoX 1.5)"

    def is_joint(self, model: Any) -> bool:
        """Only models with rotary positions have a table for all samples."""
        return bool(model.config.use_rotary_positional_embeddings)

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of a latent frame, or of several. Frames come before channels."""
        sample, patch = given["hidden_states"], model.config.patch_size
        frames, _, height, width = sample.shape[1:]
        size = (model.config.patch_size_t or 1, patch, patch)
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid_of_patches((frames, height, width), size)},
            first_frame_apart=True,
            joint=given["image_rotary_emb"] is not None,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn1.query_dim,
        sites=(
            SiteSpec("attn1", frozenset({"attn"}), around("attn1", ROTARY)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY,),
        stream=0,
    )


def _before(module: Any, given: Given) -> Tensor:
    tokens: Tensor = module.norm1(given.tokens, given["encoder_hidden_states"], given["temb"])[0]
    return tokens
