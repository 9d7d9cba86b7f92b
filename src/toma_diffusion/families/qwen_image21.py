"""QwenImage21Transformer2DModel: Qwen-Image 2.1, text to image and editing, with and without its KV cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import sequence_block
from toma_diffusion.families.grids import grid_from_shapes
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, KEYS, MASK = PerToken("rotary_emb"), PerToken("key_valid", dims=(1,)), PerToken("attention_mask", dims=(3,))
TARGETS = PerToken("target_token_mask")
TOKENS_PER_SLOT = 4
"""Image tokens for every place that the text encoder keeps for an image."""


def _before(module: Any, given: Given) -> Tensor:
    modulation = given["modulation"].chunk(2, dim=-1)[0]
    tokens: Tensor = module._modulate(module.img_norm1(given.tokens), modulation, given["target_token_mask"])[0]
    return tokens


class QwenImage21(Family):
    """One stack of blocks on one sequence: text and given images, then the generated image.

    What comes before the image does not attend to it, so that its keys can be kept from step to step: merging does not
    change them.
    """

    model_class = "QwenImage21Transformer2DModel"
    supports = "QwenImage21Transformer2DModel (Qwen-Image 2.1)"
    one_table = True
    untraceable = "Qwen-Image 2.1 reads in every call where images are, which torch.compile cannot trace"
    stacks = (
        Stack(
            "transformer_blocks",
            "block",
            sequence_block(_before, ROTARY, KEYS, MASK, TARGETS, feed_forward="img_mlp"),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """With keys kept from the first step, only the image goes through the blocks."""
        processors = {type(block.attn.processor).__name__ for block in model.transformer_blocks}
        if "QwenImage21FlexAttnProcessor" in processors:
            raise UsageError(
                "QwenImage21FlexAttnProcessor makes a mask for all tokens that merging cannot follow: use the default "
                "QwenImage21AttnProcessor."
            )
        image_tokens, text_tokens = given["hidden_states"].shape[1], given["encoder_hidden_states"].shape[1]
        grid = grid_from_shapes([shapes[-1] for shapes in given["img_shapes"]])
        # The text has a place for every four tokens of a given image, but none yet for the generated one.
        before = text_tokens - (image_tokens - grid.num_tokens) // TOKENS_PER_SLOT
        length = grid.num_tokens if given["kv_cache_mode"] == "cached" else before + image_tokens
        return self.call(model, given, grid, lengths={"block": length})
