"""What all figures here share: matplotlib without a screen, titles that may be any prompt, rows next to a figure."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from toma_diffusion.merge import Grid


def new_figure(title: str, size: tuple[float, float], rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes, [rows, columns]. Dollar signs in the title are escaped: matplotlib would read what is
    between two of them as a formula."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=12, wrap=True)
    return figure, figure.subplots(rows, columns, squeeze=False)


def show(axis: Any, image: Any, title: str = "", color: str = "black") -> None:
    """An image without a frame."""
    axis.imshow(image, interpolation="nearest")
    axis.set_title(title, fontsize=9, color=color)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def shrink(image: Image, grid: Grid) -> Tensor:
    """[height, width, 3] in 0..1: the image with one pixel per token."""
    import numpy as np
    from PIL.Image import Resampling

    small = image.convert("RGB").resize((grid.width, grid.height), Resampling.BOX)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255)


def choose_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def write_rows(rows: Sequence[Mapping[str, object]], facts: Mapping[str, object], path: Path) -> None:
    """Write the figures of a plot as CSV, each row with `facts` about the run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        writer.writerows([{**row, **facts} for row in rows])
