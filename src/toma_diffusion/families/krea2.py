"""Krea2Transformer2DModel: Krea 2."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import sequence_block
from toma_diffusion.families.modulation import from_table
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, MASK = PerToken("image_rotary_emb"), PerToken("attention_mask", dims=(3,))


class Krea2(Family):
    """One stack of blocks on one sequence: text, then the image. The blocks that prepare the text are left alone."""

    model_class = "Krea2Transformer2DModel"
    supports = "Krea2Transformer2DModel (Krea 2)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks", "block", sequence_block(from_table(scale_first=True), ROTARY, MASK), left_whole=1 / 8
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is read from the positions, which begin with those of the text."""
        image_tokens, text_tokens = given["hidden_states"].shape[1], given["encoder_hidden_states"].shape[1]
        grid = self.ids.grid(given["position_ids"], image_tokens, text_tokens)
        return self.call(model, given, grid, lengths={"block": text_tokens + image_tokens})
