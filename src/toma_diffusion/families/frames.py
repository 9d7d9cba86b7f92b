"""Grids of models whose videos come whole: patches of one or more frames are tokens."""

from __future__ import annotations

from collections.abc import Iterable

from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Grid


def grid_of_patches(sides: Iterable[int], patch_size: Iterable[int]) -> Grid:
    """The grid of a video of so many frames, rows and columns that is cut into patches."""
    frames, height, width = (side // patch for side, patch in zip(sides, patch_size, strict=True))
    return Grid(height, width, frames)


def without_first_frame(grid: Grid) -> Grid:
    """The frames after the first, which is given, not generated. It must not merge with others, so it stays whole."""
    if grid.frames == 1:
        raise UsageError("a video of one frame that is given has nothing to merge: use remove_toma for it.")
    return grid.without_first_frame
