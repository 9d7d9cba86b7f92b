"""MiniMaxH3Transformer3DModel: MiniMax-H3, video and audio from text, keyframes and references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.ids import IdReader, video_from_ids
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MODULATION = PerToken("rotary_emb"), PerToken("adaln_indices")
"""Which row of the table of modulations a token takes: one for every time and modality."""


class MiniMaxH3Adapter(Adapter):
    """One stack of blocks on one sequence: text, given frames, audio, and last the generated video, which is merged."""

    model_class = "MiniMaxH3Transformer3DModel"
    supports = "MiniMaxH3Transformer3DModel (MiniMax-H3)"

    def __init__(self) -> None:
        self._ids = IdReader(video_from_ids)

    def stacks(self, model: Any) -> list[Stack]:
        """One. The blocks that prepare the text are left alone."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the positions, once per generation. Latents may have another precision than tokens."""
        sample, positions = given["hidden_states"], given["position_ids"]
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"block": self._ids.grid(positions, sample.shape[1])},
            lengths={"block": positions.shape[0]},
            first_frame_apart=True,
            dtype=model.transformer_blocks[0].norm1.weight.dtype,
            joint=True,
        )


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.adaln_proj.hidden_size,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, MODULATION),
    )


def _before(module: Any, given: Given) -> Tensor:
    shift, scale, *_ = (each.index_select(0, given["adaln_indices"]) for each in module.adaln_proj(given["temb"]))
    tokens: Tensor = module.norm1(given.tokens) * (1 + scale) + shift
    return tokens
