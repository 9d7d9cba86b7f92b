"""The grid of image tokens, and its division into regions of equal shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from torch import Tensor

from toma_diffusion.config import REGIONS
from toma_diffusion.ops.tiles import Tiling


@dataclass(frozen=True)
class Grid:
    """Image tokens in row-major order: token `row · width + column`."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a grid of {self.height}×{self.width} tokens is empty: both sides must be 1 or more.")

    @property
    def num_tokens(self) -> int:
        """N = height · width."""
        return self.height * self.width


@dataclass(frozen=True)
class Regions:
    """A grid cut into equal rectangles. Make one with `Regions.divide`.

    All kinds are rectangles: a stripe is a rectangle of the sequence laid out as one long row, and the global region is
    one rectangle as large as the grid. Tokens that already lie in order (stripes, the global region, tiles as wide as
    the grid) are viewed, not copied.
    """

    kind: str
    layout: Grid
    """The tokens as rows and columns; for stripes one row."""
    height: int
    width: int
    grid_width: int
    """Tokens in a row of the image."""

    @classmethod
    def divide(cls, grid: Grid, kind: str, *, tokens: int | None = None, count: int | None = None) -> Regions:
        """Cut `grid` into regions of about `tokens` tokens, or into about `count` regions.

        Regions must be equal, so the region shape that divides the grid and lies nearest to the one asked for is taken
        (see `_nearest_shape`); `describe()` says which.

        Args:
            kind: `tile` (squares of `tokens` tokens, or √count × √count rectangles of the grid's shape), `stripe` (runs
                of the row-major sequence) or `global` (one region, whatever is asked for).
            tokens: of a region.
            count: number of regions. It counts if both are given.
        """
        if kind not in REGIONS:
            raise ValueError(f"region kind {kind!r} is not known: use one of {', '.join(map(repr, REGIONS))}.")
        if kind == "global":
            return cls(kind, grid, grid.height, grid.width, grid.width)
        number = count if count is not None else tokens
        if number is None or number < 1:
            raise ValueError(f"tokens={tokens}, count={count} is not allowed: one of them must be 1 or more.")
        if kind == "stripe":
            row = Grid(1, grid.num_tokens)
            length = number if count is None else grid.num_tokens / number
            return cls(kind, row, *_nearest_shape(row, 1, length), grid.width)
        side = math.sqrt(number)
        height, width = (side, side) if count is None else (grid.height / side, grid.width / side)
        return cls(kind, grid, *_nearest_shape(grid, height, width), grid.width)

    def subdivide(self, tokens: int) -> Regions:
        """Cut every region into parts of about `tokens` tokens."""
        if tokens >= self.size:
            return self
        shape = (1, tokens) if self.kind == "stripe" else (math.sqrt(tokens), math.sqrt(tokens))
        height, width = _nearest_shape(Grid(self.height, self.width), *shape)
        kind = "tile" if self.kind == "global" else self.kind
        return Regions(kind, self.layout, height, width, self.grid_width)

    @property
    def size(self) -> int:
        """Tokens in one region: n."""
        return self.height * self.width

    @property
    def count(self) -> int:
        """Number of regions: R."""
        return self.layout.num_tokens // self.size

    def describe(self) -> str:
        """The regions as text: `64 tiles of 8×8`."""
        if self.kind == "global":
            return "the whole grid"
        shape = f"{self.height}×{self.width}" if self.kind == "tile" else f"length {self.size}"
        return f"{self.count} {self.kind}{'s' if self.count > 1 else ''} of {shape}"

    @property
    def tiling(self) -> Tiling:
        """What operators need to find a region's tokens."""
        return Tiling(self.layout.width, self.height, self.width, self.layout.height, self.grid_width)

    def split(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B·R, n, C], the regions of a sample one after another."""
        return self.tiling.split(tokens)

    def join(self, tokens: Tensor) -> Tensor:
        """[B·R, n, C] -> [B, N, C], the inverse of `split`."""
        return self.tiling.join(tokens)

    def positions(self, local: Tensor) -> Tensor:
        """Indices inside each region to row-major indices of the grid: [..., R, k] -> [..., R·k]."""
        return self.tiling.positions(local).flatten(-2)

    def inside(self, outer: Regions, local: Tensor) -> Tensor:
        """Indices inside each region to indices inside the regions of `outer`, which these divide.

        [..., R, k] -> [..., R of outer, n · k], n regions in each of the outer ones.
        """
        if outer == self:
            return local
        positions = self.tiling.positions(local)
        if outer.count == 1:
            return positions.flatten(-2)[..., None, :]
        rows, columns = self.layout.height // self.height, self.layout.width // self.width
        down, across = outer.height // self.height, outer.width // self.width
        grouped = positions.unflatten(-2, (rows // down, down, columns // across, across)).transpose(-4, -3)
        grouped = grouped.flatten(-3).flatten(-3, -2)
        row, column = grouped // self.layout.width, grouped % self.layout.width
        indices: Tensor = row % outer.height * outer.width + column % outer.width
        return indices


@lru_cache(maxsize=256)
def _nearest_shape(layout: Grid, height: float, width: float) -> tuple[int, int]:
    """The rectangle that divides `layout` and lies nearest to `height` × `width`.

    Nearness is measured in ratios (twice too tall is as far as half as tall). The area counts double, because it sets
    both the cost and how far a token may lie from its destination: without it the prime grid 31×17 asked for 64 tiles
    gets regions of one token, and nothing could merge. A single token is never taken unless the grid has no more.
    """

    def distance(shape: tuple[int, int]) -> float:
        taller, wider = math.log(shape[0] / height), math.log(shape[1] / width)
        return abs(taller) + abs(wider) + 2 * abs(taller + wider)

    shapes = product(_divisors(layout.height), _divisors(layout.width))
    smallest = min(2, layout.num_tokens)
    return min((shape for shape in shapes if shape[0] * shape[1] >= smallest), key=distance)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
