"""ToFu: Token Fusion, between token pruning and token merging (Kim et al. 2023, arXiv 2312.01026)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Grid, Plan
from toma_diffusion.merge.block import Block
from toma_diffusion.others.tofu_settings import ToFuConfig
from toma_diffusion.others.tomesd import CellSampler, MatchingPlan, ToMeSD, describe_matching, expand, take


class ToFu(ToMeSD):
    """ToMeSD's matching; sources are pruned in early blocks and merged in later ones."""

    name = "tofu"
    config_class = ToFuConfig

    def plans(self, config: ToFuConfig, blocks: list[Block]) -> list[Callable[..., Plan]]:  # type: ignore[override]
        """The first ones prune, the others merge."""
        beyond = [index for index in config.prune_blocks or () if index >= len(blocks)]
        if beyond:
            raise UsageError(
                f"prune_blocks={config.prune_blocks} names block {beyond[0]}, but this model has {len(blocks)} "
                f"transformer blocks, 0 to {len(blocks) - 1}."
            )
        sampler = CellSampler(config.seed)
        return [
            partial(FusionPlan, config=config, sampler=sampler, prune=config.prunes(index, len(blocks)))
            for index in range(len(blocks))
        ]

    def describe(self, config: ToFuConfig) -> list[str]:  # type: ignore[override]
        """Which blocks prune and which merge."""
        pruned = f"the first {config.prune_share:.0%} of the blocks"
        if config.prune_blocks is not None:
            pruned = f"blocks {', '.join(map(str, config.prune_blocks))}" if config.prune_blocks else "no block"
        return [f"sources pruned in {pruned}, merged by MLERP in the others", *describe_matching(config)]


class FusionPlan(MatchingPlan):
    """The matching of ToMeSD, with sources that are either pruned or merged by MLERP."""

    def __init__(self, grid: Grid, *, prune: bool, **settings: Any) -> None:
        super().__init__(grid, **settings)
        self.prune = prune

    def merge(self, tokens: Tensor) -> Tensor:
        """Every destination represents its sources: as it is, or merged with them."""
        origins, members, targets, _ = self._matched()
        kept = take(tokens, origins)
        return kept if self.prune else mlerp(kept, take(tokens, members), expand(targets, tokens))


def mlerp(kept: Tensor, members: Tensor, targets: Tensor) -> Tensor:
    """Every token of `kept` with those `members` whose target it is: mean / ‖mean‖ · the largest of their norms.

    A mean of zero has no direction and stays zero.
    """
    mean = kept.scatter_reduce(1, targets, members, reduce="mean").float()
    longest = _norm(kept).scatter_reduce(1, targets[:, :, :1], _norm(members), reduce="amax")
    length = _norm(mean)
    scale = torch.where(length > 0, longest / length.clamp_min(torch.finfo(torch.float32).tiny), 1)
    return (mean * scale).to(kept.dtype)


def _norm(tokens: Tensor) -> Tensor:
    """[B, n, 1], in float32."""
    lengths: Tensor = torch.linalg.vector_norm(tokens.float(), dim=-1, keepdim=True)
    return lengths
