"""Grids of models whose latents come packed: they are read from the position ids of the tokens."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.core import Grid
from toma_diffusion.errors import UsageError


class IdReader:
    """Reads the grid of the generated image from position ids, once for every tensor of ids."""

    def __init__(self) -> None:
        self._ids: weakref.ref[Tensor] | None = None
        self._grid: Grid | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_ids": None, "_grid": None}  # a copied or pickled model gets other ids

    def grid(self, ids: Tensor, num_tokens: int, text_tokens: int = 0) -> Grid:
        """The grid of the first of `num_tokens` image tokens, whose ids may come after those of the text."""
        if self._grid is None or self._ids is None or self._ids() is not ids:
            self._grid = grid_from_ids(ids[..., text_tokens:, :], num_tokens)
            self._ids = weakref.ref(ids)
        return self._grid


def grid_from_ids(ids: Tensor, num_tokens: int) -> Grid:
    """Rows and columns of the generated image. It comes first; reference images after it have another first id."""
    ids = (ids[0] if ids.ndim == 3 else ids).cpu().long()
    image = ids[ids[:, 0] == ids[0, 0], 1:3]
    height, width = (int(side) + 1 for side in (image - image[0]).amax(dim=0))
    expected = torch.cartesian_prod(torch.arange(height), torch.arange(width)).reshape(-1, 2) + image[0]
    comes_first = bool((ids[: len(image), 0] == ids[0, 0]).all())
    if len(ids) != num_tokens or not comes_first or not torch.equal(image, expected):
        raise UsageError(
            f"the {num_tokens} image tokens do not begin with one row-major grid (their ids span {height}×{width}, "
            f"with {len(image)} tokens): this kind of input cannot be merged; use remove_toma for it."
        )
    return Grid(height, width)
