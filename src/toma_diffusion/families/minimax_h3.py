"""MiniMaxH3Transformer3DModel: MiniMax-H3, video and audio from text, keyframes and references."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import sequence_block
from toma_diffusion.families.grids import IdReader, video_from_ids
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MODULATION = PerToken("rotary_emb"), PerToken("adaln_indices")
"""Which row of the table of modulations a token takes: one for every time and modality."""


def _before(module: Any, given: Given) -> Tensor:
    shift, scale, *_ = (each.index_select(0, given["adaln_indices"]) for each in module.adaln_proj(given["temb"]))
    tokens: Tensor = module.norm1(given.tokens) * (1 + scale) + shift
    return tokens


class MiniMaxH3(Family):
    """One stack of blocks on one sequence: text, given frames, audio, and last the generated video, which is merged.

    The blocks that prepare the text are left alone.
    """

    model_class = "MiniMaxH3Transformer3DModel"
    supports = "MiniMaxH3Transformer3DModel (MiniMax-H3)"
    one_table = True
    stacks = (Stack("transformer_blocks", "block", sequence_block(_before, ROTARY, MODULATION), left_whole=1 / 8),)

    def __init__(self) -> None:
        self.ids = IdReader(video_from_ids)

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the positions, once per generation. Latents may have another precision than tokens."""
        positions = given["position_ids"]
        return self.call(
            model,
            given,
            self.ids.grid(positions, given["hidden_states"].shape[1]),
            lengths={"block": len(positions)},
            first_frame_apart=True,
            dtype=model.transformer_blocks[0].norm1.weight.dtype,
        )
