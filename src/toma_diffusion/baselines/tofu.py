"""ToFu: Token Fusion, between token pruning and token merging (Kim et al. 2023, arXiv 2312.01026)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from toma_diffusion.adapters import Block
from toma_diffusion.baselines.tomesd import Draws, MatchingPlan, ToMeSDConfig, expand, take
from toma_diffusion.config import check_indices, check_number
from toma_diffusion.core import Grid, Plan


@dataclass(frozen=True, kw_only=True)
class ToFuConfig(ToMeSDConfig):
    """Settings of ToFu. Immutable; a wrong value raises `ValueError` at once.

    Tokens are matched as in ToMeSD, and carried over to the same models in the same way. Where a layer answers to
    mixed tokens far from linearly, sources are pruned: their destination alone stands for them. Where it is nearly
    linear they are merged. The paper finds early layers to be of the first sort and later ones of the second. Merging
    is by MLERP, which keeps the length of tokens: the direction of the mean, the length of the longest.

    Example:

    ```python
    >>> from toma_diffusion import ToFuConfig
    >>> ToFuConfig(prune_share=0.25).prunes(index=3, num_blocks=16), ToFuConfig(prune_blocks=(0, 9)).prunes(9, 16)
    (True, True)
    ```
    """

    label: ClassVar[str] = "ToFu"

    prune_share: float = 0.5
    """Share of the model's blocks, in the order in which they run, that prune; the later ones merge. 0 merges in all
    of them, 1 prunes in all."""

    prune_blocks: tuple[int, ...] | None = None
    """Indices of the blocks that prune, instead of the first ones; the others merge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "0 ≤ prune_share ≤ 1"
        self._set("prune_share", check_number("prune_share", self.prune_share, rule, lambda x: 0 <= x <= 1))
        if self.prune_blocks is not None:
            self._set("prune_blocks", check_indices("prune_blocks", self.prune_blocks))

    def prunes(self, index: int, num_blocks: int) -> bool:
        """Whether block `index` of so many prunes."""
        if self.prune_blocks is not None:
            return index in self.prune_blocks
        return index < self.prune_share * num_blocks

    def plans(self, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """Some prune, some merge."""
        beyond = [index for index in self.prune_blocks or () if index >= len(blocks)]
        if beyond:
            raise ValueError(
                f"prune_blocks={self.prune_blocks} names block {beyond[0]}, but this model has {len(blocks)} "
                f"transformer blocks, 0 to {len(blocks) - 1}."
            )
        draws = Draws(self.seed)
        return [
            partial(FusionPlan, config=self, draws=draws, prune=self.prunes(index, len(blocks)))
            for index in range(len(blocks))
        ]

    def describe(self) -> list[str]:
        """Where tokens are pruned and where merged."""
        pruned = f"the first {self.prune_share:.0%} of the blocks"
        if self.prune_blocks is not None:
            pruned = f"blocks {', '.join(map(str, self.prune_blocks))}" if self.prune_blocks else "no block"
        return [f"sources pruned in {pruned}, merged by MLERP in the others", *super().describe()]


class FusionPlan(MatchingPlan):
    """The matching of ToMeSD, with sources that are either pruned or merged without a loss of length."""

    def __init__(self, grid: Grid, *, prune: bool, **settings: Any) -> None:
        super().__init__(grid, **settings)
        self.prune = prune

    def merge(self, tokens: Tensor) -> Tensor:
        """Every destination stands for its sources: as it is, or fused with them."""
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
