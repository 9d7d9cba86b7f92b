"""WanTransformer3DModel: Wan 2.1 and 2.2, text to video and image to video."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import cross_block
from toma_diffusion.families.grids import grid_of_patches, without_first_frame
from toma_diffusion.families.modulation import from_table
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("rotary_emb", dims=(1,))
"""It has a dimension for samples."""
MODULATION = PerToken("temb", dims=(1,), ndim=4)
"""Of models that give every token a time of its own (TI2V). In the others it has three dimensions."""


class Wan(Family):
    """One stack of blocks with self-attention, cross-attention and MLP on the tokens of all frames.

    Models with a time for every token may be given the first frame, whose time is 0. It stays whole, so that it never
    merges with others.
    """

    model_class = "WanTransformer3DModel"
    supports = "WanTransformer3DModel (Wan 2.1, 2.2)"
    stacks = (
        Stack(
            "blocks",
            "block",
            cross_block(from_table(in_float32=True), ROTARY, MODULATION, feed_forward="ffn"),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        whole = grid_of_patches(given["hidden_states"].shape[-3:], model.config.patch_size)
        may_be_given = given["timestep"].ndim == 2 and whole.frames > 1
        grid = without_first_frame(whole) if may_be_given else whole
        lengths = {"block": whole.num_tokens}
        return self.call(model, given, grid, lengths=lengths, first_frame_apart=not may_be_given)
