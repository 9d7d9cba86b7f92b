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
        self._source: weakref.ref[Tensor] | None = None
        self._grid: Grid | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": None, "_grid": None}  # a copied or pickled model gets other ids

    def grid(self, ids: Tensor, num_tokens: int, text_tokens: int = 0, made_from: Tensor | None = None) -> Grid:
        """The grid of the first of `num_tokens` image tokens.

        Args:
            ids: of the tokens, maybe after those of the text.
            num_tokens: image tokens, with those of references.
            text_tokens: how many ids come before.
            made_from: what the ids are made from anew in every step, if so. As long as it is the same tensor, the grid
                is the same.
        """
        source = ids if made_from is None else made_from
        if self._grid is None or self._source is None or self._source() is not source:
            self._grid = grid_from_ids(ids[..., text_tokens:, :], num_tokens)
            self._source = weakref.ref(source)
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
