"""Krea2Transformer2DModel: Krea 2."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.ids import IdReader
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MASK = PerToken("image_rotary_emb"), PerToken("attention_mask", dims=(3,))


class Krea2Adapter(Adapter):
    """One stack of blocks on one sequence: text, then the image. The blocks that prepare the text are left alone."""

    model_class = "Krea2Transformer2DModel"
    supports = "Krea2Transformer2DModel (Krea 2)"

    def __init__(self) -> None:
        self._ids = IdReader()

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the positions, which begin with those of the text."""
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"block": self._ids.grid(given["position_ids"], sample.shape[1], text.shape[1])},
            lengths={"block": text.shape[1] + sample.shape[1]},
            joint=True,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.attn.hidden_size,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY, MASK)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, MASK),
    )


def _before(module: Any, given: Given) -> Tensor:
    scale, shift, *_ = (given["temb"].unflatten(-1, (6, -1)) + module.scale_shift_table).unbind(-2)
    tokens: Tensor = (1 + scale) * module.norm1(given.tokens) + shift
    return tokens
