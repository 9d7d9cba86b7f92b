"""How a grid of tokens is cut into regions of equal shape, and put together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tiling(NamedTuple):
    """Regions of a grid. All numbers are known before any tensor is: compiled code must not take them from shapes,
    which may be symbols there (with them, one model took 80 s to compile in place of 18)."""

    layout_width: int
    """Tokens in a row of the grid."""
    height: int
    """Of a region, like `width`."""
    width: int
    layout_height: int
    grid_width: int
    """Tokens in a row of the image. Another number than `layout_width` for stripes, whose layout is one long row."""

    @property
    def size(self) -> int:
        """Tokens of a region."""
        return self.height * self.width

    @property
    def length(self) -> int:
        """Tokens of the grid."""
        return self.layout_width * self.layout_height

    @property
    def num_regions(self) -> int:
        """Number of regions."""
        return self.length // self.size

    @property
    def largest_distance(self) -> float:
        """No squared distance between two tokens of a region is larger."""
        if self.layout_width == self.grid_width:
            return (self.height**2 + self.width**2) / self.size
        rows = self.width // self.grid_width + 1  # a stripe may go from the end of one row to the next
        return (rows**2 + self.grid_width**2) / self.size

    def positions(self, local: Tensor) -> Tensor:
        """Indices inside each region to row-major indices of the grid: [..., R, k] -> [..., R, k]."""
        region = torch.arange(self.num_regions, device=local.device)[:, None]
        columns = self.layout_width // self.width
        row = region // columns * self.height + local // self.width
        column = region % columns * self.width + local % self.width
        return row * self.layout_width + column

    def squared_distance(self, left: Tensor, right: Tensor) -> Tensor:
        """Of tokens of the same region, in sides of a region: indices [B·R, k], [n] -> float32 [B·R, k, n]."""
        from_row, from_column = self._coordinates(left.reshape(-1, self.num_regions, left.shape[-1]))
        to_row, to_column = self._coordinates(right.expand(1, self.num_regions, -1))
        rows = (from_row[:, :, :, None] - to_row[:, :, None, :]).float().square()
        columns = (from_column[:, :, :, None] - to_column[:, :, None, :]).float().square()
        return ((rows + columns) / self.size).flatten(0, 1)

    def _coordinates(self, local: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.positions(local)
        return positions // self.grid_width, positions % self.grid_width

    def split(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B·R, n, C], the regions of a sample one after another."""
        rows, columns = self.layout_height // self.height, self.layout_width // self.width
        tokens = tokens.reshape(-1, rows, self.height, columns, self.width, tokens.shape[-1])
        # [B, rows, columns, height, width, C]
        return tokens.transpose(2, 3).reshape(-1, self.size, tokens.shape[-1])

    def join(self, tokens: Tensor) -> Tensor:
        """[B·R, n, C] -> [B, N, C], the inverse of `split`."""
        rows, columns = self.layout_height // self.height, self.layout_width // self.width
        tokens = tokens.reshape(-1, rows, columns, self.height, self.width, tokens.shape[-1])
        return tokens.transpose(2, 3).reshape(-1, self.length, tokens.shape[-1])
