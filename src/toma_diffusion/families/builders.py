"""Builders of blocks, for the stacks of a family. A builder is called with what blocks of its stack have in common, and
returns what makes a `Block` of a module, its name and its kind.

All take `normalize`, a function of a block and its arguments, which computes what its first layer gets (see
`families.modulation`), and `per_token`: the arguments of the block and of its attention with a row for every token. A
name that one of them does not have is not looked for in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Builder, around
from toma_diffusion.families.modulation import Before, Normalize
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.sites import GatherRows, MergeOutput, PerToken, Site, UnmergeOutput, never


def joint_block(
    normalize: Normalize,
    *per_token: PerToken,
    attention: tuple[str, ...] = ("attn",),
    feed_forward: str = "ff",
    stream: int = 1,
    image_outputs: tuple[int, ...] = (0,),
) -> Builder:
    """Image and text in two streams, which attend to each other.

    Args:
        attention: its attention modules. One that a block does not have is left out.
        feed_forward: that of the image.
        stream: which of the block's outputs is the image.
        image_outputs: which outputs of attention are of the image.
    """
    sites = [site("attn", name, *per_token, streams=image_outputs) for name in attention]
    return _builder(normalize, per_token, *sites, site("ff", feed_forward), stream=stream)


def sequence_block(
    normalize: Normalize, *per_token: PerToken, attention: str = "attn", feed_forward: str | None = "ff"
) -> Builder:
    """One sequence, with attention and a feed-forward layer, one after the other or side by side.

    Args:
        feed_forward: None if it is inside the attention module.
    """
    if feed_forward is None:
        both = SiteSpec(attention, frozenset({"attn", "ff"}), around(attention, *per_token))
        return _builder(normalize, per_token, both)
    return _builder(normalize, per_token, site("attn", attention, *per_token), site("ff", feed_forward))


def single_block(
    normalize: Normalize, *per_token: PerToken, stream: int | None = None, writes_in_place: bool = False
) -> Builder:
    """Attention and MLP side by side between `norm` and `proj_out`, on text and image.

    Args:
        stream: which of the block's outputs is the image; None if it returns one tensor.
    """

    def hooks(site: Site) -> list[tuple[str, Hook]]:  # gate and residual are not merged
        return [
            ("norm", MergeOutput(site)),
            ("attn", GatherRows(site, per_token)),
            ("proj_out", UnmergeOutput(site)),
        ]

    both = SiteSpec("norm…proj_out", frozenset({"attn", "ff"}), hooks)
    return _builder(normalize, per_token, both, stream=stream, writes_in_place=writes_in_place)


def cross_block(
    normalize: Normalize,
    *per_token: PerToken,
    attention: str = "attn1",
    cross_attention: tuple[str, ...] = ("attn2",),
    per_query: tuple[PerToken, ...] = (),
    feed_forward: str = "ff",
    stream: int | None = None,
) -> Builder:
    """Self-attention, cross-attention to text (or more), and a feed-forward layer.

    Args:
        per_query: the arguments of cross-attention with a row for every token of the image.
        stream: which of the block's outputs is the image; None if it returns one tensor.
    """
    crossing = [site("cross_attn", name, *per_query) for name in cross_attention]
    sites = (site("attn", attention, *per_token), *crossing, site("ff", feed_forward))
    return _builder(normalize, per_token, *sites, stream=stream)


def unet_block(normalize: Normalize) -> Builder:
    """`BasicTransformerBlock` of diffusers, of which UNets and PixArt are made. Some have no cross-attention."""
    return _builder(
        normalize,
        (),
        site("attn", "attn1", check=_refuse_mask),
        site("cross_attn", "attn2", leave_whole=_has_image_masks),
        site("ff", "ff"),
        takes_other_keys=True,
    )


def _has_image_masks(given: Given) -> bool:
    """IP-Adapter masks need the whole grid of queries."""
    return given["ip_adapter_masks"] is not None


def _refuse_mask(given: Given) -> None:
    if given["attention_mask"] is not None:
        raise UsageError(
            "self-attention got an attention_mask over image tokens, which merging cannot follow: "
            "leave attention_mask out, or merge without 'attn' among the sites."
        )


def site(
    role: str,
    name: str,
    *per_token: PerToken,
    streams: tuple[int, ...] = (0,),
    check: Callable[[Given], object] = never,
    leave_whole: Callable[[Given], bool] = never,
) -> SiteSpec:
    """A module of a block that is merged in scope `module`."""
    return SiteSpec(name, frozenset({role}), around(name, *per_token, check=check, streams=streams), leave_whole)


def _builder(normalize: Normalize, per_token: tuple[PerToken, ...], *sites: SiteSpec, **facts: Any) -> Builder:
    return partial(_build, normalize=Before(normalize), per_token=per_token, sites=sites, **facts)


def _build(module: Any, name: str, kind: str, sites: tuple[SiteSpec, ...], **facts: Any) -> Block:
    """The sites of modules that this block has: some blocks of a model lack an attention."""
    return Block(
        name=name,
        module=module,
        kind=kind,
        width=_width(module),
        sites=tuple(site for site in sites if getattr(module, site.name, site) is not None),
        feed_forward_chunk_dim=upstream.feed_forward_chunk_dim(module),
        **facts,
    )


def _width(module: Any) -> int:
    """Channels of the tokens that go through a block: those that its first attention gets."""
    attention = next(getattr(module, name) for name in ("attn", "attn1", "attention") if hasattr(module, name))
    width: int = attention.query_dim if hasattr(attention, "query_dim") else attention.to_q.in_features
    return width
