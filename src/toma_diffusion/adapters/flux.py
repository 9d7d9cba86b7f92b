"""FluxTransformer2DModel: Flux.1 dev, schnell, Fill, Control and Kontext (only the generated image is merged)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from toma_diffusion.adapters import _diffusers
from toma_diffusion.adapters.base import Adapter, AfterModulatingNorm, Block, SiteSpec, argument, around
from toma_diffusion.core import Grid
from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.sites import (
    Arguments,
    GatherPositions,
    Hook,
    KeyBias,
    Keywords,
    MergeInput,
    MergeOutput,
    Site,
    UnmergeOutput,
)
from toma_diffusion.hooks.state import Call

ROTARY = "image_rotary_emb"
TEXT = "encoder_hidden_states"
KEY_BIAS = KeyBias("joint_attention_kwargs.attention_mask", dims=4, text=TEXT)
"""Of a block. Its attention takes `attention_mask` itself."""
KEY_BIAS_OF_ATTENTION = KeyBias("attention_mask", dims=4, text=TEXT)
LEFT_WHOLE = 5
"""The paper does not merge the first 10 of 57 blocks, in which text and image are combined: 5 joint, 5 single ones."""


class FluxAdapter(Adapter):
    """Joint blocks, then single blocks. A merged token has the RoPE row of its destination. Text is never merged."""

    supports = "FluxTransformer2DModel (Flux.1 dev, schnell, Fill, Control, Kontext)"

    def __init__(self) -> None:
        self._ids: weakref.ref[Tensor] | None = None
        self._grid: Grid | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_ids": None, "_grid": None}  # a copied or pickled model gets other ids

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is a FluxTransformer2DModel."""
        return _diffusers.is_instance(model, "FluxTransformer2DModel")

    def defaults(self, model: Any) -> dict[str, Any]:
        """As in the paper: select in every step, do not merge the first joint and single blocks."""
        joint, single = len(model.transformer_blocks), len(model.single_transformer_blocks)
        skipped = [*range(min(LEFT_WHOLE, joint)), *range(joint, joint + min(LEFT_WHOLE, single))]
        return {"select_every": 1, "reweigh_every": 1, "skip_blocks": tuple(skipped)}

    def blocks(self, model: Any) -> list[Block]:
        """Joint, then single."""
        joint = [_describe_joint(block, index) for index, block in enumerate(model.transformer_blocks)]
        single = [_describe_single(block, index) for index, block in enumerate(model.single_transformer_blocks)]
        return joint + single

    def read_call(self, model: Any, args: Arguments, kwargs: Keywords) -> Call:
        """Latents are packed, so the grid is read from the position ids, once per generation."""
        sample = argument("hidden_states", 0, args, kwargs)
        grid = self._read_grid(argument("img_ids", 4, args, kwargs), sample.shape[1])
        controlled = any(
            argument(name, index, args, kwargs) is not None
            for name, index in (("controlnet_block_samples", 8), ("controlnet_single_block_samples", 9))
        )
        return Call(
            sample=sample,
            conditioning=argument("encoder_hidden_states", 1, args, kwargs),
            timestep=argument("timestep", 3, args, kwargs),
            grids={"joint": grid, "single": grid},
            image_tokens=sample.shape[1],
            joint=True,
            block_by_block="a ControlNet adds its residuals after every block" if controlled else None,
        )

    def _read_grid(self, ids: Tensor, num_tokens: int) -> Grid:
        if self._grid is None or self._ids is None or self._ids() is not ids:
            self._grid = grid_from_ids(ids, num_tokens)
            self._ids = weakref.ref(ids)
        return self._grid


def grid_from_ids(ids: Tensor, num_tokens: int) -> Grid:
    """Rows and columns of the generated image. It comes first; reference images after it have another first id."""
    ids = (ids[0] if ids.ndim == 3 else ids).cpu().long()
    image = ids[ids[:, 0] == ids[0, 0], 1:3]
    height, width = (int(side) + 1 for side in (image - image[0]).amax(dim=0))
    expected = torch.cartesian_prod(torch.arange(height), torch.arange(width)).reshape(-1, 2) + image[0]
    comes_first = bool((ids[: len(image), 0] == ids[0, 0]).all())
    if len(ids) != num_tokens or not comes_first or not torch.equal(image, expected):
        raise UsageError(
            f"the {num_tokens} image tokens do not begin with one row-major grid (their ids span {height}×{width}, "
            f"with {len(image)} tokens): this kind of input cannot be merged; use remove_toma for it."
        )
    return Grid(height, width)


def _describe_joint(module: Any, index: int) -> Block:
    return Block(
        name=f"transformer_blocks.{index}",
        module=module,
        kind="joint",
        run="transformer_blocks",
        width=module.attn.query_dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), _around_attention),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=AfterModulatingNorm("norm1"),
        position_table=ROTARY,
        key_bias=KEY_BIAS,
        stream=1,
        returns_text=True,
    )


def _describe_single(module: Any, index: int) -> Block:
    return Block(
        name=f"single_transformer_blocks.{index}",
        module=module,
        kind="single",
        run="single_transformer_blocks",
        width=module.attn.query_dim,
        sites=(SiteSpec("norm…proj_out", frozenset({"attn", "ff"}), _between_norm_and_projection),),
        normalize=AfterModulatingNorm("norm"),
        position_table=ROTARY,
        key_bias=KEY_BIAS,
        stream=1,
        returns_text=True,
    )


def _around_attention(site: Site) -> list[tuple[str, Hook]]:
    """Attention returns image, text and, with an IP-Adapter, its contribution to the image."""
    return [("attn", MergeInput(site, ROTARY, KEY_BIAS_OF_ATTENTION)), ("attn", UnmergeOutput(site, streams=(0, 2)))]


def _between_norm_and_projection(site: Site) -> list[tuple[str, Hook]]:
    """Attention and MLP run in parallel between norm and output projection; gate and residual are not merged."""
    positions = GatherPositions(site, ROTARY, KEY_BIAS_OF_ATTENTION)
    return [("norm", MergeOutput(site)), ("attn", positions), ("proj_out", UnmergeOutput(site))]
