"""HunyuanVideoTransformer3DModel: HunyuanVideo, text to video and image to video."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import joint_block, single_block
from toma_diffusion.families.grids import grid_of_patches, without_first_frame
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = (PerToken("image_rotary_emb"), PerToken("freqs_cis"))
"""Joint blocks call it otherwise than attention and single blocks."""
MASK = PerToken("attention_mask", dims=(3,))
"""[batch, 1, 1, tokens]: of the video, then of the text."""


def _after_norm(module: Any, given: Given, norm: str) -> Tensor:
    """Some models replace the tokens of the first frame, which is given, and modulate them otherwise."""
    replaced = {}
    if given["token_replace_emb"] is not None:
        replaced = {"token_replace_emb": given["token_replace_emb"], "first_frame_num_tokens": given["num_tokens"]}
    tokens: Tensor = getattr(module, norm)(given.tokens, emb=given["temb"], **replaced)[0]
    return tokens


class HunyuanVideo(Family):
    """Joint blocks, then single blocks, which run on the video and the text after it.

    The first frame stays whole if it is given (`token_replace`).
    """

    model_class = "HunyuanVideoTransformer3DModel"
    supports = "HunyuanVideoTransformer3DModel (HunyuanVideo)"
    one_table = True
    stacks = (
        Stack(
            "transformer_blocks",
            "joint",
            joint_block(partial(_after_norm, norm="norm1"), *ROTARY, MASK, stream=0),
            left_whole=1 / 4,
        ),
        Stack(
            "single_transformer_blocks",
            "single",
            single_block(partial(_after_norm, norm="norm"), *ROTARY, MASK, stream=0),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        config = model.config
        patch = (config.patch_size_t, config.patch_size, config.patch_size)
        whole = grid_of_patches(given["hidden_states"].shape[-3:], patch)
        grid = without_first_frame(whole) if config.image_condition_type == "token_replace" else whole
        return self.call(
            model,
            given,
            grid,
            image_at=whole.num_tokens - grid.num_tokens,
            lengths={"joint": whole.num_tokens, "single": whole.num_tokens},
            first_frame_apart=grid == whole,
        )
