"""AuraFlowTransformer2DModel: AuraFlow."""

from __future__ import annotations

from functools import partial
from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, AfterModulatingNorm, Block, SiteSpec, Stack, around
from toma_diffusion.merge import Grid
from toma_diffusion.merge.state import Call


class AuraFlowAdapter(Adapter):
    """Joint blocks, then single blocks on one sequence of text and image. Positions are added before the first."""

    model_class = "AuraFlowTransformer2DModel"
    supports = "AuraFlowTransformer2DModel (AuraFlow)"

    def stacks(self, model: Any) -> list[Stack]:
        """Joint, then single."""
        return [
            Stack("joint_transformer_blocks", partial(_describe, kind="joint", stream=1), left_whole=1 / 4),
            Stack("single_transformer_blocks", partial(_describe, kind="single"), left_whole=1 / 8),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """A token is a patch of the latent. The model adds tokens of its own to the text."""
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        height, width = (side // model.config.patch_size for side in sample.shape[-2:])
        grid, text_tokens = Grid(height, width), text.shape[1] + model.register_tokens.shape[1]
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"joint": grid, "single": grid},
            lengths={"single": text_tokens + grid.num_tokens},
        )


def _describe(module: Any, name: str, kind: str, stream: int | None = None) -> Block:
    return Block(
        name=name,
        module=module,
        kind=kind,
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn")),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=AfterModulatingNorm("norm1"),
        stream=stream,
    )
