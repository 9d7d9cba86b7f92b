"""ToDo: Token Downsampling for Efficient Generation of High-Resolution Images (Smith et al. 2024, arXiv 2402.13573)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from toma_diffusion.checks import check_integer, check_sequence
from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Grid, Plan
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.sites import Site
from toma_diffusion.others.base import PerBlockMethod, relative_levels

LARGEST_FACTOR = 8
TOLERANCE = 1e-3
"""Allows 1 − 1/9 to be written as 0.889."""


@dataclass(frozen=True, kw_only=True)
class ToDo(Merging):
    """Settings of ToDo. Immutable; a wrong value raises `UsageError` at once.

    In self-attention, queries are computed from all tokens, keys and values only from every n-th row and column of the
    grid. Nothing is merged, so nothing has to be restored.

    Keys must be computed from other tokens than queries, which is possible in UNets and PixArt. Flux and SD3 attend to
    text and image jointly, with queries and keys from the same tokens; there it raises an error.

    Example:

    ```python
    >>> from toma_diffusion.others import ToDo
    >>> ToDo(ratio=0.75, deeper_factors=(2,)).factors
    (2, 2)
    >>> ToDo(ratio=0.5)
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: ratio=0.5 is not allowed: every n-th row and column stays, so it must be ...
    ```
    """

    label: ClassVar[str] = "ToDo"

    ratio: float = 0.75
    """Fraction of keys and values removed at the first level that has attention: 0.75 keeps every 2nd row and column,
    0.8889 every 3rd, 0.9375 every 4th. Higher is faster and loses more detail."""

    deeper_factors: tuple[int, ...] = ()
    """The same for the levels below, as factors: (2,) keeps every 2nd row and column at the next level too. The
    authors do not reduce those levels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        factors = check_sequence("deeper_factors", self.deeper_factors, "a whole number for each level")
        self._set("deeper_factors", tuple(check_integer("deeper_factors", each, minimum=1) for each in factors))
        factor = factor_of(self.ratio)
        if factor is None:
            raise UsageError(
                f"ratio={self.ratio:g} is not allowed: every n-th row and column stays, so it must be 0.75, 0.8889, "
                "0.9375, …"
            )
        self._set("ratio", 1 - 1 / factor**2)

    @property
    def factors(self) -> tuple[int, ...]:
        """By level, from the first that has attention."""
        return (factor_of(self.ratio) or 1, *self.deeper_factors)


def factor_of(ratio: float) -> int | None:
    """The n with ratio = 1 − 1/n², if there is one."""
    return next((n for n in range(2, LARGEST_FACTOR + 1) if abs(1 - 1 / n**2 - ratio) < TOLERANCE), None)


class ToDoMethod(PerBlockMethod[ToDo]):
    """Queries from all tokens, keys and values from a smaller grid."""

    name = "todo"
    config_class = ToDo
    reads_blocks = False

    def left_whole(self, config: ToDo, blocks: list[Block]) -> dict[int, str]:
        """Blocks of a lower resolution. Raises for joint attention."""
        joint = [block.name for block in blocks if not block.takes_other_keys]
        if joint:
            raise UsageError(
                f"ToDo cannot be applied here: {joint[0]} makes queries and keys from the same tokens, with the same "
                "positions, so that keys alone cannot be reduced. "
                "Use it on a UNet or PixArt, or use 'tomesd' or 'tofu' here."
            )
        levels = relative_levels(blocks)
        return {index: "level without a factor" for index, level in enumerate(levels) if level >= len(config.factors)}

    def plans(self, config: ToDo, blocks: list[Block]) -> list[Callable[..., Plan]]:
        by_level = dict(enumerate(config.factors))
        return [partial(DownsamplePlan, factor=by_level.get(level, 1)) for level in relative_levels(blocks)]

    def hooks(self, spec: SiteSpec, site: Site) -> list[tuple[str, Hook]]:
        return [(spec.name, DownsampleKeys(site))]

    def describe(self, config: ToDo) -> list[str]:
        factors = ", ".join(map(str, config.factors))
        return [f"keys and values of self-attention downsampled by {factors}; queries whole"]


class DownsamplePlan(Plan):
    """Every n-th row and column of a grid, in row-major order. If n does not divide a side, the nearest rows."""

    def __init__(
        self,
        grid: Grid,
        *,
        factor: int,
        device: torch.device | str = "cpu",
        **others: Any,  # which all plans get, and this one does not need
    ) -> None:
        self.grid = grid
        self.factor = factor
        self.height, self.width = (max(1, side // factor) for side in (grid.height, grid.width))
        rows = torch.arange(self.height, device=device) * grid.height // self.height
        columns = torch.arange(self.width, device=device) * grid.width // self.width
        frames = torch.arange(grid.frames, device=device) * grid.height
        self.positions = ((frames[:, None, None] + rows[:, None]) * grid.width + columns).flatten()

    @property
    def num_destinations(self) -> int:
        return self.grid.frames * self.height * self.width

    @property
    def buffers(self) -> list[Tensor]:
        return [self.positions]

    def describe(self) -> str:
        return f"keys and values of {self.height}×{self.width}"

    def merge(self, tokens: Tensor) -> Tensor:
        return tokens.index_select(1, self.positions)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """Nothing to restore: there is a query for every token."""
        return merged if residual is None else residual + merged

    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
        return table.index_select(dim, self.positions)


@dataclass(eq=False)
class DownsampleKeys(Hook):
    """Forward pre-hook of self-attention: passes fewer tokens for keys and values, in the argument in which
    cross-attention gets its text."""

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        if given["encoder_hidden_states"] is not None:
            raise UsageError("this block attends to text where others attend to themselves: name it in skip_blocks.")
        if upstream.has_fused_projections(module):
            raise UsageError(
                "ToDo makes keys from other tokens than queries, which fused projections cannot: "
                "call unfuse_qkv_projections first."
            )
        given = given.with_argument("encoder_hidden_states", self.site.merge(plan, given.tokens))
        return given.args, given.kwargs
