"""Figures 3 and 9 of the paper: similar tokens are neighbours in the image, in every block and step.

The tokens of a block are clustered by k-means. Each cluster is shown in the mean colour of its part of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toma_diffusion.merge import Grid
from toma_lab.inspection.titles import put_title
from toma_lab.inspection.watch import BlockInput

if TYPE_CHECKING:
    from PIL.Image import Image

CLUSTERS = 24
MOST_ROWS, MOST_COLUMNS = 6, 6
ITERATIONS = 30
"""Of k-means, at most. Clusters of real tokens hardly change after 20."""
_SEED = 0


@dataclass(eq=False)
class ClusterRecorder:
    """Clusters the tokens of some steps and blocks. Pass it to `watch`."""

    steps: Sequence[int]
    blocks: Sequence[str]
    labels: dict[tuple[str, int], tuple[Grid, Tensor]] = field(default_factory=dict)
    """For each block and step: the grid, and the cluster of every token."""

    def __call__(self, block_input: BlockInput) -> None:
        """Cluster the tokens if this is one of the steps and blocks."""
        if block_input.step in self.steps and block_input.block in self.blocks:
            grid = block_input.grid
            count = max(1, min(CLUSTERS, grid.num_tokens // 4))
            self.labels[block_input.block, block_input.step] = grid, kmeans(block_input.tokens.cpu(), count)


def kmeans(tokens: Tensor, count: int) -> Tensor:
    """Cluster tokens by k-means: a k-means++ start, then Lloyd's iterations. The same tokens give the same clusters.

    Args:
        tokens: [N, d], on the CPU.
        count: how many clusters to make, at most N. A cluster may end up empty.

    Returns:
        int64 [N]: the cluster of each token.
    """
    tokens = tokens.double()
    centers = _spread_centers(tokens, count)
    labels = torch.full((len(tokens),), -1)
    for _ in range(ITERATIONS):
        nearest = torch.cdist(tokens, centers).argmin(dim=1)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        sizes = torch.bincount(labels, minlength=count)[:, None]  # [k, 1]
        sums = torch.zeros_like(centers).index_add_(0, labels, tokens)
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)  # an empty cluster keeps its center
    return labels


def _spread_centers(tokens: Tensor, count: int) -> Tensor:
    """k-means++: each next center is a token, chosen with a probability that grows with the squared distance to the
    nearest center so far."""
    generator = torch.Generator().manual_seed(_SEED)
    chosen = [int(torch.randint(len(tokens), (1,), generator=generator))]
    distances = torch.full((len(tokens),), torch.inf, dtype=tokens.dtype)
    for _ in range(count - 1):
        distances = torch.minimum(distances, (tokens - tokens[chosen[-1]]).square().sum(dim=1))
        weights = distances if distances.any() else torch.ones_like(distances)  # all tokens equal a center
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    return tokens[chosen]


def choose_evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def recolor(image: Image, grid: Grid, labels: Tensor) -> Tensor:
    """[height, width, 3] in 0..1, one pixel per token, in the mean colour of its cluster's part of the image."""
    colors = shrink(image, grid).reshape(grid.num_tokens, 3)
    count = int(labels.max()) + 1
    sums = torch.zeros(count, 3).index_add_(0, labels, colors)
    sizes = torch.bincount(labels, minlength=count).clamp(min=1)[:, None]
    return (sums / sizes)[labels].reshape(grid.height, grid.width, 3)


def shrink(image: Image, grid: Grid) -> Tensor:
    """[height, width, 3] in 0..1: the image with one pixel per token."""
    import numpy as np
    from PIL.Image import Resampling

    small = image.convert("RGB").resize((grid.width, grid.height), Resampling.BOX)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255)


def plot_clusters(image: Image, recorder: ClusterRecorder, title: str, path: Path) -> None:
    """Write a figure: one row per block, one column per step, and the image itself."""
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
    """Shorten `down_blocks.0.attentions.1.transformer_blocks.0`, which does not fit a label, to `down 0.1.0`."""
    for word in (".attentions", ".transformer_blocks", "_transformer_blocks", "_blocks", "_block"):
        block = block.replace(word, "")
    return block.replace(".", " ", 1)
