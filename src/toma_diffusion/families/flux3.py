"""Flux3Transformer2DModel: FLUX.3, text to image. Reference images are not supported."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.ids import IdReader
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MODULATION = PerToken("image_rotary_emb"), PerToken("temb_mod", dims=(1,))


class Flux3Adapter(Adapter):
    """Blocks on the image alone, then blocks on text and image. The blocks on the text alone are left alone."""

    model_class = "Flux3Transformer2DModel"
    supports = "Flux3Transformer2DModel (FLUX.3, without reference images)"

    def __init__(self) -> None:
        self._ids = IdReader()

    def stacks(self, model: Any) -> list[Stack]:
        """Those of the image, then the joint ones."""
        return [
            Stack("mode_blocks.image", partial(_describe, kind="image"), left_whole=1 / 4),
            Stack("single_transformer_blocks", partial(_describe, kind="joint", stream=1), left_whole=1 / 8),
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the position ids, once per generation."""
        if given["image_cond_hidden_states"] is not None:
            raise UsageError(
                "FLUX.3 with reference images is not supported: generate without them, or use remove_toma for it."
            )
        sample = given["hidden_states"]
        grid = self._ids.grid(given["img_ids"], sample.shape[1])
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"image": grid, "joint": grid},
            joint=True,
        )


def _describe(module: Any, name: str, kind: str, stream: int | None = None) -> Block:
    """Attention and MLP run in parallel, on the same tokens."""
    return Block(
        name=name,
        module=module,
        kind=kind,
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, MODULATION),
        stream=stream,
    )


def _before(module: Any, given: Given) -> Tensor:
    shift, scale, _ = given["temb_mod"].chunk(3, dim=-1)
    tokens: Tensor = (1 + scale) * module.norm(given.tokens) + shift
    return tokens
