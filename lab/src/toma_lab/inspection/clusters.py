"""Figures 3 and 9 of the paper: similar tokens are neighbours in the image, in every block and step.

The tokens of a block are clustered by k-means. Each cluster is shown in the mean colour of its part of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toma_diffusion.merge import Grid
from toma_lab.inspection.figures import new_figure, show, shrink
from toma_lab.inspection.watch import BlockInput

if TYPE_CHECKING:
    from PIL.Image import Image

CLUSTERS = 24
MOST_ROWS, MOST_COLUMNS = 6, 6


@dataclass(eq=False)
class ClusterRecorder:
    """Clusters the tokens of some steps and blocks. Pass it to `watch`."""

    steps: Sequence[int]
    blocks: Sequence[str]
    labels: dict[tuple[str, int], tuple[Grid, Tensor]] = field(default_factory=dict)
    """For each block and step: the grid, and the cluster of every token."""

    def __call__(self, block_input: BlockInput) -> None:
        """Cluster the tokens if this is one of the steps and blocks."""
        from sklearn.cluster import KMeans

        if block_input.step not in self.steps or block_input.block not in self.blocks:
            return
        grid = block_input.grid
        means = KMeans(max(1, min(CLUSTERS, grid.num_tokens // 4)), n_init=1, random_state=0)
        labels = means.fit_predict(block_input.tokens.cpu().numpy())
        self.labels[block_input.block, block_input.step] = grid, torch.from_numpy(labels).long()


def recolor(image: Image, grid: Grid, labels: Tensor) -> Tensor:
    """[height, width, 3] in 0..1, one pixel per token, in the mean colour of its cluster's part of the image."""
    colors = shrink(image, grid).reshape(grid.num_tokens, 3)
    count = int(labels.max()) + 1
    sums = torch.zeros(count, 3).index_add_(0, labels, colors)
    sizes = torch.bincount(labels, minlength=count).clamp(min=1)[:, None]
    return (sums / sizes)[labels].reshape(grid.height, grid.width, 3)


def plot_clusters(image: Image, recorder: ClusterRecorder, title: str, path: Path) -> None:
    """Write a figure: one row per block, one column per step, and the image itself."""
    rows, columns = len(recorder.blocks), len(recorder.steps)
    size = (1.6 * (columns + 1) + 0.4, 1.6 * image.height / image.width * rows + 0.7)
    figure, axes = new_figure(title, size, rows, columns + 1)
    for row, block in enumerate(recorder.blocks):
        for column, step in enumerate(recorder.steps):
            recolored = recolor(image, *recorder.labels[block, step]).numpy()
            show(axes[row, column], recolored, f"step {step}" if row == 0 else "")
        grid, _ = recorder.labels[block, recorder.steps[0]]
        axes[row, 0].set_ylabel(f"{short_name(block)}\n{grid.height}×{grid.width}", fontsize=7)
    show(axes[0, -1], image, "image")
    for axis in axes[1:, -1]:
        axis.remove()
    figure.savefig(path, dpi=130)


def short_name(block: str) -> str:
    """Shorten `down_blocks.0.attentions.1.transformer_blocks.0`, which does not fit a label, to `down 0.1.0`."""
    for word in (".attentions", ".transformer_blocks", "_transformer_blocks", "_blocks", "_block"):
        block = block.replace(word, "")
    return block.replace(".", " ", 1)
