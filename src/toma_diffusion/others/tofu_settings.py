"""Settings of ToFu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toma_diffusion.checks import check_indices, check_number
from toma_diffusion.others.tomesd_settings import ToMeSDConfig


@dataclass(frozen=True, kw_only=True)
class ToFuConfig(ToMeSDConfig):
    """Settings of ToFu. Immutable; a wrong value raises `UsageError` at once.

    Tokens are matched as in ToMeSD. In blocks that are far from linear, matched tokens are pruned: they are dropped,
    and get a copy of their destination's result. In blocks that are nearly linear, they are merged. The paper finds
    that early blocks are far from linear and later ones nearly linear. Merging is by MLERP: the direction of the mean,
    with the length of the longest token.

    Example:

    ```python
    >>> from toma_diffusion import ToFuConfig
    >>> ToFuConfig(prune_share=0.25).prunes(index=3, num_blocks=16), ToFuConfig(prune_blocks=(0, 9)).prunes(9, 16)
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
