"""HunyuanVideo15Transformer3DModel: HunyuanVideo 1.5, text to video and image to video."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, AfterModulatingNorm, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, ROTARY_OF_ATTENTION = PerToken("freqs_cis"), PerToken("image_rotary_emb")


class HunyuanVideo15Adapter(Adapter):
    """One stack of joint blocks. The mask is that of the text; attention makes one of all tokens of it, merged or not.

    The text stream holds the tokens of two text encoders and of the given image.
    """

    model_class = "HunyuanVideo15Transformer3DModel"
    supports = "HunyuanVideo15Transformer3DModel (HunyuanVideo 1.5)"

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of one or more latent frames."""
        sample, config = given["hidden_states"], model.config
        size = (config.patch_size_t, config.patch_size, config.patch_size)
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid_of_patches(sample.shape[-3:], size)},
            first_frame_apart=True,
            joint=True,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY_OF_ATTENTION)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=AfterModulatingNorm("norm1"),
        per_token=(ROTARY,),
        stream=0,
    )
