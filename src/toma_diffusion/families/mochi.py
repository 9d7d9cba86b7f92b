"""MochiTransformer3DModel: Mochi 1."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, AfterModulatingNorm, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb")
"""[tokens, heads, channels]: one for every sample, [batch, tokens, heads, channels], works as well."""


class MochiAdapter(Adapter):
    """One stack of joint blocks. The last does not change the text."""

    model_class = "MochiTransformer3DModel"
    supports = "MochiTransformer3DModel (Mochi 1)"

    def is_joint(self, model: nn.Module) -> bool:
        """Every sample can have its own table of positions."""
        return False

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of a latent frame."""
        sample, patch = given["hidden_states"], model.config.patch_size
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid_of_patches(sample.shape[-3:], (1, patch, patch))},
            first_frame_apart=True,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn1.out_dim,
        sites=(
            SiteSpec("attn1", frozenset({"attn"}), around("attn1", ROTARY)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=AfterModulatingNorm("norm1"),
        per_token=(ROTARY,),
        stream=0,
    )
