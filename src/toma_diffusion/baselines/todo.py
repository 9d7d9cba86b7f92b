"""ToDo: Token Downsampling for Efficient Generation of High-Resolution Images (Smith et al. 2024, arXiv 2402.13573)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from toma_diffusion.adapters import Block, SiteSpec, _diffusers
from toma_diffusion.adapters.base import argument
from toma_diffusion.baselines.base import BaselineConfig, relative_levels
from toma_diffusion.config import check_integer, check_sequence
from toma_diffusion.core import Grid, Plan
from toma_diffusion.hooks.sites import Arguments, Hook, Keywords, Site, get_hidden_states

LARGEST_FACTOR = 8
TOLERANCE = 1e-3
"""So that 1 − 1/9 may be written as 0.889."""


@dataclass(frozen=True, kw_only=True)
class ToDoConfig(BaselineConfig):
    """Settings of ToDo. Immutable; a wrong value raises `ValueError` at once.

    In self-attention all tokens ask, but only every n-th row and column of the grid answers: keys and values are made
    from a smaller grid, by nearest neighbour. Nothing is merged, so that nothing is to be restored.

    It needs self-attention in which keys can be made from other tokens than queries: UNets and PixArt have it. Flux
    and SD3 attend to text and image jointly, with queries and keys made from the same tokens; there it is refused.

    Example:

    ```python
    >>> from toma_diffusion import ToDoConfig
    >>> ToDoConfig(ratio=0.75, deeper_factors=(2,)).factors
    (2, 2)
    >>> ToDoConfig(ratio=0.5)
    Traceback (most recent call last):
    ValueError: ratio=0.5 is not allowed: every n-th row and column stays, so it must be 0.75, 0.8889, 0.9375, …, or 0.
    ```
    """

    label: ClassVar[str] = "ToDo"
    reads_blocks: ClassVar[bool] = False

    ratio: float = 0.75
    """Share of the keys and values removed at the first level that has attention: 0.75 keeps every 2nd row and column,
    0.8889 every 3rd, 0.9375 every 4th. Higher is faster and loses more detail."""

    deeper_factors: tuple[int, ...] = ()
    """The same for the levels below, as factors: (2,) keeps every 2nd row and column at the next level too. The
    authors leave those levels whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        factors = check_sequence("deeper_factors", self.deeper_factors, "a whole number for each level")
        self._set("deeper_factors", tuple(check_integer("deeper_factors", each, minimum=1) for each in factors))
        factor = factor_of(self.ratio)
        if factor is None:
            raise ValueError(
                f"ratio={self.ratio:g} is not allowed: every n-th row and column stays, so it must be 0.75, 0.8889, "
                "0.9375, …, or 0."
            )
        self._set("ratio", 1 - 1 / factor**2)

    @property
    def factors(self) -> tuple[int, ...]:
        """By level, from the first that has attention."""
        return (factor_of(self.ratio) or 1, *self.deeper_factors)

    def left_alone(self, blocks: list[Block]) -> dict[int, str]:
        """Blocks of a lower resolution. Refuses joint attention."""
        joint = [block.name for block in blocks if block.stream is not None]
        if joint:
            raise ValueError(
                f"ToDo cannot be applied here: {joint[0]} attends to text and image jointly and makes queries and keys "
                "from the same tokens, with the same positions, so that keys alone cannot be reduced. "
                "Use it on a UNet or PixArt, or take 'tomesd' or 'tofu' here."
            )
        levels = relative_levels(blocks)
        return {index: "level without a factor" for index, level in enumerate(levels) if level >= len(self.factors)}

    def plans(self, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """By level."""
        by_level = dict(enumerate(self.factors))
        return [partial(DownsamplePlan, factor=by_level.get(level, 1)) for level in relative_levels(blocks)]

    def hooks(self, spec: SiteSpec, site: Site) -> list[tuple[str, Hook]]:
        """One before self-attention."""
        return [(spec.name, DownsampleKeys(site))]

    def describe(self) -> list[str]:
        """What is reduced."""
        return [f"keys and values of self-attention downsampled by {', '.join(map(str, self.factors))}; queries whole"]


class DownsamplePlan(Plan):
    """Every n-th row and column of a grid, in row-major order. On sides that n does not divide, the rows nearest."""

    def __init__(
        self,
        grid: Grid,
        *,
        factor: int,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        joint: bool = False,
    ) -> None:
        self.grid = grid
        self.factor = factor
        self.height, self.width = (max(1, side // factor) for side in (grid.height, grid.width))
        rows = torch.arange(self.height, device=device) * grid.height // self.height
        columns = torch.arange(self.width, device=device) * grid.width // self.width
        self.positions = (rows[:, None] * grid.width + columns).flatten()

    @property
    def num_destinations(self) -> int:
        """Tokens that keys and values are made from."""
        return self.height * self.width

    @property
    def buffers(self) -> list[Tensor]:
        """The indices that stay."""
        return [self.positions]

    def describe(self) -> str:
        """The smaller grid."""
        return f"keys and values of {self.height}×{self.width}"

    def merge(self, tokens: Tensor) -> Tensor:
        """The tokens that stay."""
        return tokens.index_select(1, self.positions)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """Queries are whole, and so is what comes of them."""
        return merged if residual is None else residual + merged

    def gather(self, table: Tensor) -> Tensor:
        """The rows of the tokens that stay."""
        return table.index_select(0, self.positions)


@dataclass(eq=False)
class DownsampleKeys(Hook):
    """Forward pre-hook of self-attention: keys and values are made from fewer tokens, by way of the argument in which
    cross-attention gets its text."""

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Pass the smaller grid beside the whole one."""
        plan = self.site.plan(kwargs)
        if plan is None:
            return None
        if argument("encoder_hidden_states", 1, args, kwargs) is not None:
            raise ValueError("this block attends to text where others attend to themselves: name it in skip_blocks.")
        if _diffusers.has_fused_projections(module):
            raise ValueError(
                "ToDo makes keys from other tokens than queries, which fused projections cannot: "
                "call unfuse_qkv_projections first."
            )
        tokens = self.site.merge(plan, get_hidden_states(args, kwargs))
        return args, {**kwargs, "encoder_hidden_states": tokens}


def factor_of(ratio: float) -> int | None:
    """The n with ratio = 1 − 1/n², if there is one."""
    return next((n for n in range(1, LARGEST_FACTOR + 1) if abs(1 - 1 / n**2 - ratio) < TOLERANCE), None)
