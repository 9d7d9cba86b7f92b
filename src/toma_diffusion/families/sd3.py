"""SD3Transformer2DModel: Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, AfterModulatingNorm, Block, SiteSpec, Stack, adds_residuals, around
from toma_diffusion.merge import Grid
from toma_diffusion.merge.state import Call


class SD3Adapter(Adapter):
    """One stack of joint blocks. Some have a second, image-only attention; the last returns no text."""

    model_class = "SD3Transformer2DModel"
    supports = "SD3Transformer2DModel (Stable Diffusion 3, 3.5)"

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe)]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of the latent."""
        sample = given["hidden_states"]
        height, width = (side // model.config.patch_size for side in sample.shape[-2:])
        skipped = "skip-layer guidance leaves out blocks" if given["skip_layers"] else None
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": Grid(height, width)},
            block_by_block=adds_residuals(given, "block_controlnet_hidden_states") or skipped,
        )


def _describe(module: Any, name: str) -> Block:
    sites = [SiteSpec("attn", frozenset({"attn"}), around("attn"))]
    if module.use_dual_attention:
        sites.append(SiteSpec("attn2", frozenset({"attn"}), around("attn2")))
    sites.append(SiteSpec("ff", frozenset({"ff"}), around("ff")))
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.attn.query_dim,
        sites=tuple(sites),
        normalize=AfterModulatingNorm("norm1"),
        stream=1,
        feed_forward_chunk_dim=upstream.feed_forward_chunk_dim(module),
    )
