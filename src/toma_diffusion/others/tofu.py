"""ToFu: Token Fusion, between token pruning and token merging (Kim et al. 2023, arXiv 2312.01026)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from toma_diffusion.checks import check_indices, check_number
from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Grid, Plan
from toma_diffusion.merge.block import Block
from toma_diffusion.others.tomesd import (
    CellSampler,
    MatchingPlan,
    ToMeSD,
    ToMeSDMethod,
    expand,
    take,
)


@dataclass(frozen=True, kw_only=True)
class ToFu(ToMeSD):
    """Settings of ToFu. Immutable; a wrong value raises `UsageError` at once.

    Tokens are matched as in ToMeSD. In blocks that are far from linear, matched tokens are pruned: they are dropped,
    and get a copy of their destination's result. In blocks that are nearly linear, they are merged. The paper finds
    that early blocks are far from linear and later ones nearly linear. Merging is by MLERP: the direction of the mean,
    with the length of the longest token.

    Example:

    ```python
    >>> from toma_diffusion.others import ToFu
    >>> ToFu(prune_share=0.25).prunes(index=3, num_blocks=16), ToFu(prune_blocks=(0, 9)).prunes(9, 16)
    (True, True)
    ```
    """

    label: ClassVar[str] = "ToFu"

    prune_share: float = 0.5
    """Fraction of the blocks that prune, the first ones in the order in which they run; the others merge. 0 merges in
    all blocks, 1 prunes in all."""

    prune_blocks: tuple[int, ...] | None = None
    """Indices of the blocks that prune, instead of the first ones; the others merge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "0 ≤ prune_share ≤ 1"
        self._set("prune_share", check_number("prune_share", self.prune_share, rule, lambda x: 0 <= x <= 1))
        if self.prune_blocks is not None:
            self._set("prune_blocks", check_indices("prune_blocks", self.prune_blocks, minimum=0))

    def prunes(self, index: int, num_blocks: int) -> bool:
        """Whether block `index` of so many prunes."""
        if self.prune_blocks is not None:
            return index in self.prune_blocks
        return index < self.prune_share * num_blocks


class ToFuMethod(ToMeSDMethod):
    """ToMeSD's matching; sources are pruned in early blocks and merged in later ones."""

    name = "tofu"
    config_class = ToFu

    def plans(self, config: ToFu, blocks: list[Block]) -> list[Callable[..., Plan]]:  # type: ignore[override]
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

    def describe(self, config: ToFu) -> list[str]:  # type: ignore[override]
        pruned = f"the first {config.prune_share:.0%} of the blocks"
        if config.prune_blocks is not None:
            pruned = f"blocks {', '.join(map(str, config.prune_blocks))}" if config.prune_blocks else "no block"
        return [f"sources pruned in {pruned}, merged by MLERP in the others", *super().describe(config)]


class FusionPlan(MatchingPlan):
    """The matching of ToMeSD, with sources that are either pruned or merged by MLERP."""

    def __init__(self, grid: Grid, *, prune: bool, **settings: Any) -> None:
        super().__init__(grid, **settings)
        self.prune = prune

    def merge(self, tokens: Tensor) -> Tensor:
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
