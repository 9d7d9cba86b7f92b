"""How a grid of tokens is cut into regions of equal shape, and put together again."""

from __future__ import annotations

from typing import NamedTuple

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
