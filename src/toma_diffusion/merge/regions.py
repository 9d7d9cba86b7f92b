"""The grid of image tokens, and its division into regions of equal shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from torch import Tensor

from toma_diffusion.merge.config import REGIONS
from toma_diffusion.ops.tiles import Tiling


@dataclass(frozen=True)
class Grid:
    """Image tokens in row-major order: token `row · width + column`. The frames of a video come one after another."""

    height: int
    width: int
    frames: int = 1

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.frames) < 1:
            sides = f"{self.frames} frames of {self.height}×{self.width}"
            raise ValueError(f"a grid of {sides} tokens is empty: all sides must be 1 or more.")

    @property
    def num_tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def without_first_frame(self) -> Grid:
        return Grid(self.height, self.width, self.frames - 1)

    def describe(self) -> str:
        return f"{self.frames}×{self.height}×{self.width}" if self.frames > 1 else f"{self.height}×{self.width}"


@dataclass(frozen=True)
class Regions:
    """A grid cut into equal boxes. Make one with `Regions.divide`.

    All kinds are boxes: a stripe is a box in the sequence laid out as one long row, and the global region is one box as
    large as the grid. Those of an image are rectangles; in a video they may go over several frames. Tokens that already
    lie in order (stripes, the global region, tiles as wide as the grid) are viewed, not copied.
    """

    kind: str
    grid: Grid
    depth: int
    """Frames of a region."""
    height: int
    width: int

    @classmethod
    def divide(
        cls, grid: Grid, kind: str, *, tokens: int | None = None, count: int | None = None, frames: int = 1
    ) -> Regions:
        """Cut `grid` into regions of about `tokens` tokens, or into about `count` regions.

        Regions must be equal, so the region shape that divides the grid and lies nearest to the one asked for is taken
        (see `_nearest_shape`); `describe()` says which.

        Args:
            kind: `tile` (squares of `tokens` tokens, or √count × √count rectangles of the grid's shape), `stripe` (runs
                of the row-major sequence) or `global` (one region, whatever is asked for).
            tokens: of a region.
            count: number of regions. It counts if both are given.
            frames: of a tile, in a video. With 1, no tile goes over several frames.
        """
        if kind not in REGIONS:
            raise ValueError(f"region kind {kind!r} is not known: use one of {', '.join(map(repr, REGIONS))}.")
        if kind == "global":
            return cls(kind, grid, grid.frames, grid.height, grid.width)
        number = count if count is not None else tokens
        if number is None or number < 1:
            raise ValueError(f"tokens={tokens}, count={count} is not allowed: one of them must be 1 or more.")
        if kind == "stripe":
            length = number if count is None else grid.num_tokens / number
            return cls(kind, grid, *_nearest_shape(Grid(1, grid.num_tokens), 1, 1, length))
        if grid.frames > 1:
            size = number if count is None else grid.num_tokens / number
            side = math.sqrt(size / frames)
            within = grid if frames > 1 else Grid(grid.height, grid.width)
            return cls(kind, grid, *_nearest_shape(within, frames, side, side))
        side = math.sqrt(number)
        height, width = (side, side) if count is None else (grid.height / side, grid.width / side)
        return cls(kind, grid, *_nearest_shape(grid, 1, height, width))

    def subdivide(self, tokens: int) -> Regions:
        """Cut every region into parts of about `tokens` tokens, which go over as many frames."""
        if tokens >= self.size:
            return self
        side = math.sqrt(tokens / self.depth)
        shape = (1, 1, tokens) if self.kind == "stripe" else (self.depth, side, side)
        kind = "tile" if self.kind == "global" else self.kind
        return Regions(kind, self.grid, *_nearest_shape(Grid(self.height, self.width, self.depth), *shape))

    @property
    def size(self) -> int:
        return self.depth * self.height * self.width

    @property
    def count(self) -> int:
        return self.grid.num_tokens // self.size

    def describe(self) -> str:
        """The regions as text: `64 tiles of 8×8`, `195 tiles of 4×8×8`."""
        if self.kind == "global":
            return "the whole grid"
        over = f"{self.depth}×" if self.grid.frames > 1 else ""
        shape = f"{over}{self.height}×{self.width}" if self.kind == "tile" else f"length {self.size}"
        return f"{self.count} {self.kind}{'s' if self.count > 1 else ''} of {shape}"

    @property
    def tiling(self) -> Tiling:
        """What operators need to find a region's tokens."""
        grid = self.grid
        layout = (1, grid.num_tokens) if self.kind == "stripe" else (grid.frames * grid.height, grid.width)
        return Tiling(
            layout_width=layout[1],
            height=self.height,
            width=self.width,
            layout_height=layout[0],
            grid_width=grid.width,
            grid_height=grid.height,
            depth=self.depth,
        )

    def split(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B·R, n, C], the regions of a sample one after another."""
        return self.tiling.split(tokens)

    def join(self, tokens: Tensor) -> Tensor:
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
        counts, outer_counts = self.tiling.counts, outer.tiling.counts
        inner = [count // of_outer for count, of_outer in zip(counts, outer_counts, strict=True)]
        sizes = [size for pair in zip(outer_counts, inner, strict=True) for size in pair]
        # [..., layers, inner layers, rows, inner rows, columns, inner columns, k] -> those of outer, then the inner
        grouped = positions.unflatten(-2, sizes).movedim((-6, -4, -2), (-4, -3, -2))
        grouped = grouped.flatten(-4).flatten(-4, -2)
        layout_width, frame_rows = self.tiling.layout_width, self.tiling.frame_rows
        row, column = grouped // layout_width, grouped % layout_width
        depth, height, width = row // frame_rows % outer.depth, row % frame_rows % outer.height, column % outer.width
        indices: Tensor = (depth * outer.height + height) * outer.width + width
        return indices


@lru_cache(maxsize=256)
def _nearest_shape(layout: Grid, depth: float, height: float, width: float) -> tuple[int, int, int]:
    """The box that divides `layout` and lies nearest to `depth` × `height` × `width`.

    Nearness is measured in ratios (twice too tall is as far as half as tall). The volume counts double, because it sets
    both the cost and how far a token may lie from its destination: without it the prime grid 31×17 asked for 64 tiles
    gets regions of one token, and nothing could merge. A single token is never taken unless the grid has no more. Nor
    are more than twice the frames that were asked for: a larger number of frames that is prime is not divided at all.
    """

    def distance(shape: tuple[int, int, int]) -> float:
        longer, taller, wider = (math.log(side / asked) for side, asked in zip(shape, wanted, strict=True))
        return abs(longer) + abs(taller) + abs(wider) + 2 * abs(longer + taller + wider)

    wanted = (depth, height, width)
    shapes = product(_depths(layout.frames, depth), _divisors(layout.height), _divisors(layout.width))
    smallest = min(2, layout.num_tokens)
    allowed = [shape for shape in shapes if math.prod(shape) >= smallest]
    return min(allowed or [(layout.frames, layout.height, layout.width)], key=distance)


def divides_frames(frames: int, asked: float) -> bool:
    """Whether so many frames can be divided into regions of about the frames asked for, and of more than one."""
    return _depths(frames, asked) != [1]


def _depths(frames: int, asked: float) -> list[int]:
    return [depth for depth in _divisors(frames) if depth <= 2 * asked or depth == 1]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
