"""How a grid of tokens is cut into regions of equal shape, and put together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """Regions of a grid. All numbers are known before any tensor is: compiled code must not take them from shapes,
    which may be symbols there (with them, one model took 80 s to compile in place of 18).

    The frames of a video lie one below the other in the layout. Its regions go over `depth` frames; those of an image,
    or of depth 1, are plain rectangles of the layout.
    """

    layout_width: int
    """Tokens in a row of the grid."""
    height: int
    """Of a region, like `width`, in one frame."""
    width: int
    layout_height: int
    """Rows of all frames."""
    grid_width: int
    """Tokens in a row of the image. Another number than `layout_width` for stripes, whose layout is one long row."""
    grid_height: int
    """Rows of one frame."""
    depth: int = 1
    """Frames of a region."""

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def size(self) -> int:
        return self.depth * self.area

    @property
    def length(self) -> int:
        return self.layout_width * self.layout_height

    @property
    def num_regions(self) -> int:
        return self.length // self.size

    @property
    def num_frames(self) -> int:
        return self.length // (self.grid_width * self.grid_height)

    @property
    def frame_rows(self) -> int:
        """Rows of the layout in one frame. A layout of one long row, for stripes, has but that one."""
        return min(self.layout_height, self.grid_height)

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many regions lie one after another in time, below each other, and side by side."""
        rows, columns = self.frame_rows // self.height, self.layout_width // self.width
        return self.layout_height // (self.frame_rows * self.depth), rows, columns

    def largest_penalty(self, distance_weight: float) -> float:
        """No `penalty` of two tokens of a region is larger."""
        if self.layout_width == self.grid_width:
            space, frames = (self.height**2 + self.width**2) / self.area, min(1, self.num_frames - 1)
        else:  # a stripe may go from the end of one row, or frame, to the next
            rows = self.width // self.grid_width + 1 if self.num_frames == 1 else self.grid_height
            space = (rows**2 + self.grid_width**2) / self.area
            frames = min(self.width // (self.grid_width * self.grid_height) + 1, self.num_frames - 1)
        return distance_weight * space + distance_weight * frames**2

    def positions(self, local: Tensor) -> Tensor:
        """Indices inside each region to row-major indices of the grid: [..., R, k] -> [..., R, k]."""
        region = torch.arange(self.num_regions, device=local.device)[:, None]
        _, rows, columns = self.counts
        frame = region // (rows * columns) * self.depth + local // self.area
        row = region // columns % rows * self.height + local % self.area // self.width
        column = region % columns * self.width + local % self.width
        return (frame * self.frame_rows + row) * self.layout_width + column

    def penalty(self, left: Tensor, right: Tensor, distance_weight: float) -> Tensor:
        """What the distance of tokens of a region takes off their similarity.

        The square of their distance, in sides of a region in the image and in depths of a region in time, times the
        weight: [B·R, k], [n] -> float32 [B·R, k, n].
        """
        source = self._coordinates(left.reshape(-1, self.num_regions, left.shape[-1]))
        target = self._coordinates(right.expand(1, self.num_regions, -1))
        frames, rows, columns = (
            (one[:, :, :, None] - other[:, :, None, :]).float().square()
            for one, other in zip(source, target, strict=True)
        )
        penalty = distance_weight * ((rows + columns) / self.area)
        if self.num_frames > 1:
            penalty = penalty + distance_weight * (frames / self.depth**2)
        return penalty.flatten(0, 1)

    def _coordinates(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = self.positions(local)
        rows = positions // self.grid_width
        return rows // self.grid_height, rows % self.grid_height, positions % self.grid_width

    def split(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B·R, n, C], the regions of a sample one after another."""
        layers, rows, columns = self.counts
        tokens = tokens.reshape(-1, layers, self.depth, rows, self.height, columns, self.width, tokens.shape[-1])
        # [B, layers, rows, columns, depth, height, width, C]
        return tokens.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, self.size, tokens.shape[-1])

    def join(self, tokens: Tensor) -> Tensor:
        tokens = tokens.reshape(-1, *self.counts, self.depth, self.height, self.width, tokens.shape[-1])
        # [B, layers, depth, rows, height, columns, width, C]
        return tokens.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, self.length, tokens.shape[-1])
