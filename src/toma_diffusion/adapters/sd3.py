"""SD3Transformer2DModel: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.adapters import _diffusers
from toma_diffusion.adapters.base import Adapter, AfterModulatingNorm, Block, SiteSpec, argument, around
from toma_diffusion.core import Grid
from toma_diffusion.hooks.sites import Arguments, Keywords
from toma_diffusion.hooks.state import Call


class SD3Adapter(Adapter):
    """One stack of joint blocks. Some have a second, image-only attention; the last returns no text."""

    supports = "SD3Transformer2DModel (Stable Diffusion 3, 3.5)"

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is an SD3Transformer2DModel."""
        return _diffusers.is_instance(model, "SD3Transformer2DModel")

    def blocks(self, model: Any) -> list[Block]:
        """The stack."""
        return [_describe(block, index) for index, block in enumerate(model.transformer_blocks)]

    def read_call(self, model: Any, args: Arguments, kwargs: Keywords) -> Call:
        """A token is a patch of the latent."""
        sample = argument("hidden_states", 0, args, kwargs)
        height, width = (side // model.config.patch_size for side in sample.shape[-2:])
        block_by_block = None
        skipped = "skip-layer guidance leaves out blocks" if kwargs.get("skip_layers") else None
        if argument("block_controlnet_hidden_states", 4, args, kwargs) is not None:
            block_by_block = "a ControlNet adds its residuals after every block"
        elif skipped is not None:
            block_by_block = skipped
        return Call(
            sample=sample,
            conditioning=argument("encoder_hidden_states", 1, args, kwargs),
            timestep=argument("timestep", 3, args, kwargs),
            grids={"joint": Grid(height, width)},
            block_by_block=block_by_block,
            blocks_skipped=skipped,
        )


def _describe(module: Any, index: int) -> Block:
    sites = [SiteSpec("attn", frozenset({"attn"}), around("attn"))]
    if module.use_dual_attention:
        sites.append(SiteSpec("attn2", frozenset({"attn"}), around("attn2")))
    sites.append(SiteSpec("ff", frozenset({"ff"}), around("ff")))
    return Block(
        name=f"transformer_blocks.{index}",
        module=module,
        kind="joint",
        run="transformer_blocks",
        width=module.attn.query_dim,
        sites=tuple(sites),
        normalize=AfterModulatingNorm("norm1"),
        stream=1,
        returns_text=not module.context_pre_only,
        feed_forward_chunk_dim=_diffusers.feed_forward_chunk_dim(module),
    )
