"""Figures 3 and 9 of the paper: tokens that are alike lie side by side in the image, in every block and step.

The tokens of a block are clustered by k-means, and every cluster takes the mean colour of the image where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toma_diffusion.core import Grid
from toma_diffusion.inspection.titles import put_title
from toma_diffusion.inspection.watch import Sight

if TYPE_CHECKING:
    from PIL.Image import Image

CLUSTERS = 24
MOST_ROWS, MOST_COLUMNS = 6, 6
_SEED = 0


@dataclass(eq=False)
class ClusterRecorder:
    """Clusters the tokens of the wanted steps and blocks. Give it to `watch`."""

    steps: Sequence[int]
    blocks: Sequence[str]
    labels: dict[tuple[str, int], tuple[Grid, Tensor]] = field(default_factory=dict)
    """By block and step: the grid, and the cluster of every token."""

    def __call__(self, sight: Sight) -> None:
        """Cluster, if it is one of those."""
        if sight.step not in self.steps or sight.block not in self.blocks:
            return
        from scipy.cluster.vq import kmeans2

        count = min(CLUSTERS, sight.grid.num_tokens // 4)
        tokens = sight.tokens.cpu().numpy()
        _, labels = kmeans2(tokens, count, minit="++", rng=_SEED, missing="warn")
        self.labels[sight.block, sight.step] = sight.grid, torch.from_numpy(labels).long()


def choose_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, the first and the last among them, evenly spread."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def recolor(image: Image, grid: Grid, labels: Tensor) -> Tensor:
    """[height, width, 3] in 0..1, one pixel a token: each has the mean colour of its cluster's part of the image."""
    colors = shrink(image, grid).reshape(grid.num_tokens, 3)
    count = int(labels.max()) + 1
    sums = torch.zeros(count, 3).index_add_(0, labels, colors)
    sizes = torch.bincount(labels, minlength=count).clamp(min=1)[:, None]
    return (sums / sizes)[labels].reshape(grid.height, grid.width, 3)


def shrink(image: Image, grid: Grid) -> Tensor:
    """The image with one pixel a token."""
    import numpy as np
    from PIL.Image import Resampling

    small = image.convert("RGB").resize((grid.width, grid.height), Resampling.BOX)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255)


def draw_clusters(image: Image, recorder: ClusterRecorder, title: str, path: Path) -> None:
    """A row a block, a column a step, and the image itself."""
    from matplotlib.figure import Figure

    rows, columns = len(recorder.blocks), len(recorder.steps)
    aspect = image.height / image.width
    figure = Figure(figsize=(1.6 * (columns + 1) + 0.4, 1.6 * aspect * rows + 0.7), layout="constrained")
    put_title(figure, title)
    axes: Any = figure.subplots(rows, columns + 1, squeeze=False)
    for row, block in enumerate(recorder.blocks):
        for column, step in enumerate(recorder.steps):
            axis = axes[row, column]
            axis.imshow(recolor(image, *recorder.labels[block, step]).numpy(), interpolation="nearest")
            if row == 0:
                axis.set_title(f"step {step}", fontsize=9)
        grid, _ = recorder.labels[block, recorder.steps[0]]
        axes[row, 0].set_ylabel(f"{short_name(block)}\n{grid.height}×{grid.width}", fontsize=7)
    axes[0, -1].imshow(image)
    axes[0, -1].set_title("image", fontsize=9)
    for axis in axes[1:, -1]:
        axis.remove()
    for axis in (*axes[:, :-1].flat, axes[0, -1]):
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    figure.savefig(path, dpi=130)


def short_name(block: str) -> str:
    """`down_blocks.0.attentions.1.transformer_blocks.0` is too long for the side of a picture: `down 0.1.0`."""
    for word in (".attentions", ".transformer_blocks", "_transformer_blocks", "_blocks", "_block"):
        block = block.replace(word, "")
    return block.replace(".", " ", 1)
