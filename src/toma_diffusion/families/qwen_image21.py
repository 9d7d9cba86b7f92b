"""QwenImage21Transformer2DModel: Qwen-Image 2.1, text to image and editing, with and without its KV cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.qwen_image import grid_from_shapes
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY, KEYS, MASK = PerToken("rotary_emb"), PerToken("key_valid", dims=(1,)), PerToken("attention_mask", dims=(3,))
TARGETS = PerToken("target_token_mask")
TOKENS_PER_SLOT = 4
"""Image tokens for every place that the text encoder keeps for an image."""


class QwenImage21Adapter(Adapter):
    """One stack of blocks on one sequence: text and given images, then the generated image.

    What comes before the image does not attend to it, so that its keys can be kept from step to step: merging does not
    change them.
    """

    model_class = "QwenImage21Transformer2DModel"
    supports = "QwenImage21Transformer2DModel (Qwen-Image 2.1)"
    untraceable = "Qwen-Image 2.1 reads in every call where images are, which torch.compile cannot trace"

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """With keys kept from the first step, only the image goes through the blocks."""
        if any(type(block.attn.processor).__name__ == "QwenImage21FlexAttnProcessor" for block in _stack(model)):
            raise UsageError(
                "QwenImage21FlexAttnProcessor makes a mask for all tokens that merging cannot follow: use the default "
                "QwenImage21AttnProcessor."
            )
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        grid = grid_from_shapes([shapes[-1] for shapes in given["img_shapes"]])
        # The text has a place for every four tokens of a given image, but none yet for the generated one.
        before = text.shape[1] - (sample.shape[1] - grid.num_tokens) // TOKENS_PER_SLOT
        length = grid.num_tokens if given["kv_cache_mode"] == "cached" else before + sample.shape[1]
        return Call(
            sample=sample,
            conditioning=text,
            timestep=given["timestep"],
            grids={"block": grid},
            lengths={"block": length},
            joint=True,
        )


def _stack(model: Any) -> Any:
    return model.transformer_blocks


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.attn.to_q.in_features,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY, KEYS, MASK)),
            SiteSpec("img_mlp", frozenset({"ff"}), around("img_mlp")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, KEYS, MASK, TARGETS),
    )


def _before(module: Any, given: Given) -> Tensor:
    modulation = given["modulation"].chunk(2, dim=-1)[0]
    tokens: Tensor = module._modulate(module.img_norm1(given.tokens), modulation, given["target_token_mask"])[0]
    return tokens
