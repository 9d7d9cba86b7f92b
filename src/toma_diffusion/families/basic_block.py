"""`BasicTransformerBlock` of diffusers, of which UNets and PixArt are made: self-attention, cross-attention, MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Block, SiteSpec, around
from toma_diffusion.merge.sites import KeyBias


def describe_block(module: Any, name: str, kind: str, run: str, level: int = 0) -> Block:
    """A `BasicTransformerBlock` as a `Block`."""
    key_bias = None if module.only_cross_attention else KeyBias("attention_mask", dims=3)
    sites = [SiteSpec("attn1", frozenset({"attn"}), around("attn1", key_bias=key_bias, check=_refuse_mask))]
    if module.attn2 is not None:
        sites.append(SiteSpec("attn2", frozenset({"cross_attn"}), around("attn2"), has_image_masks))
    sites.append(SiteSpec("ff", frozenset({"ff"}), around("ff")))
    return Block(
        name=name,
        module=module,
        kind=kind,
        run=run,
        width=module.attn1.query_dim,
        sites=tuple(sites),
        normalize=normalize,
        key_bias=key_bias,
        takes_other_keys=True,
        level=level,
        feed_forward_chunk_dim=upstream.feed_forward_chunk_dim(module),
    )


def has_image_masks(given: Given) -> bool:
    """IP-Adapter masks need the whole grid of queries."""
    return given["ip_adapter_masks"] is not None


def normalize(module: Any, given: Given) -> Tensor:
    """The block's tokens after its first norm."""
    with upstream.weights_loaded(module):
        return _normalize(module, given.tokens, given)


def _normalize(module: Any, tokens: Tensor, given: Given) -> Tensor:
    if module.norm_type == "ada_norm":
        normalized = module.norm1(tokens, given["timestep"])
    elif module.norm_type == "ada_norm_zero":
        normalized = module.norm1(tokens, given["timestep"], given["class_labels"], hidden_dtype=tokens.dtype)[0]
    elif module.norm_type == "ada_norm_continuous":
        normalized = module.norm1(tokens, given["added_cond_kwargs"]["pooled_text_emb"])
    elif module.norm_type == "ada_norm_single":
        modulation = module.scale_shift_table[None] + given["timestep"].reshape(tokens.shape[0], 6, -1)
        shift, scale = modulation[:, 0:1], modulation[:, 1:2]
        normalized = module.norm1(tokens) * (1 + scale) + shift
    else:
        normalized = module.norm1(tokens)
    result: Tensor = normalized
    return result


def _refuse_mask(given: Given) -> None:
    if given["attention_mask"] is not None:
        raise UsageError(
            "self-attention got an attention_mask over image tokens, which merging cannot follow: "
            "leave attention_mask out, or merge without 'attn' among the sites."
        )
