"""The grid of tokens in a call: from the size of a latent, or from the position ids of packed latents."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Grid

ReadIds = Callable[[Tensor, int], Grid]
"""Finds the grid in the ids of so many tokens."""


def grid_of_patches(sides: Iterable[int], patch_size: Iterable[int]) -> Grid:
    """The grid of a latent of so many rows and columns, or frames, rows and columns, that is cut into patches."""
    *frames, height, width = (side // patch for side, patch in zip(sides, patch_size, strict=True))
    return Grid(height, width, *frames)


def without_first_frame(grid: Grid) -> Grid:
    """The frames after the first, which is given, not generated. It must not merge with others, so it stays whole."""
    if grid.frames == 1:
        raise UsageError("a video of one frame that is given has nothing to merge: call handle.remove() for it.")
    return grid.without_first_frame


def grid_from_shapes(shapes: Sequence[tuple[int, int, int]]) -> Grid:
    """The grid of images of these frames, rows and columns, which must all be the same."""
    frames, height, width = shapes[0]
    if frames != 1 or any(tuple(shape) != tuple(shapes[0]) for shape in shapes):
        raise UsageError(
            f"img_shapes has {', '.join(map(str, shapes))} for the generated images of a batch: merging needs images "
            "of one size, with one frame. Generate them one by one, or call handle.remove()."
        )
    return Grid(height, width)


class IdReader:
    """Reads the grid of what is generated from position ids, once for every tensor of ids."""

    def __init__(self, read: ReadIds) -> None:
        self._read = read
        self._source: weakref.ref[Tensor] | None = None
        self._grid: Grid | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_read": self._read, "_source": None, "_grid": None}  # a copied or pickled model gets other ids

    def grid(self, ids: Tensor, num_tokens: int, text_tokens: int = 0, made_from: Tensor | None = None) -> Grid:
        """The grid in `num_tokens` image tokens.

        Args:
            ids: of the tokens, maybe after those of the text.
            num_tokens: image tokens, with those of references.
            text_tokens: how many ids come before.
            made_from: what the ids are made from anew in every step, if so. As long as it is the same tensor, the grid
                is the same.
        """
        source = ids if made_from is None else made_from
        if self._grid is None or self._source is None or self._source() is not source:
            self._grid = self._read(ids[..., text_tokens:, :], num_tokens)
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
            f"with {len(image)} tokens): this kind of input cannot be merged; call handle.remove() for it."
        )
    return Grid(height, width)


def video_from_ids(ids: Tensor, num_tokens: int) -> Grid:
    """Frames, rows and columns of the video that comes last, from the (time, row, column) of every token.

    Its frames have the same rows and columns, and later frames have later times. What comes before it, such as frames
    that are given, does not continue it backwards in time.

    Args:
        num_tokens: of the video and of given frames together.
    """
    ids = ids.cpu()
    size = int((ids[:, 0] == ids[-1, 0]).flip(0).cummin(0).values.sum())  # tokens of a frame
    last = ids[-size:, 1:]
    frames, before = 1, ids[:-size]
    while len(before) >= size and _is_frame(before[-size:], last) and before[-1, 0] < ids[-frames * size, 0]:
        frames, before = frames + 1, before[:-size]
    height, width = (len(last[:, axis].unique()) for axis in (0, 1))
    expected = torch.cartesian_prod(last[:, 0].unique(), last[:, 1].unique())
    if frames * size > num_tokens or not torch.equal(last, expected):
        raise UsageError(
            f"the last of {len(ids)} tokens are not frames of one row-major grid (a frame has {height}×{width} "
            f"positions and {size} tokens): this kind of input cannot be merged; call handle.remove() for it."
        )
    return Grid(height, width, frames)


def _is_frame(ids: Tensor, other: Tensor) -> bool:
    """Whether these ids have one time, and the rows and columns of another frame."""
    return bool((ids[:, 0] == ids[0, 0]).all()) and torch.equal(ids[:, 1:], other)
