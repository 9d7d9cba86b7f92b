"""Token merging made visible on one photograph: its patches are the tokens.

Three ways to choose destinations are shown at three ratios, with everything after the choice the same: the method's
merge and unmerge. What the reconstruction loses is what merging costs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.config import ToMAConfig
from toma_diffusion.core import Action, Grid, MergePlan
from toma_diffusion.errors import UsageError

PATCH = 8
"""Side of a token in pixels: the share of the image that one token of a Stable Diffusion latent stands for."""
RATIOS = (0.25, 0.5, 0.75)
SELECTIONS = ("facility-location", "random", "strided")

_COLORS = {"facility-location": "#0b6e4f", "random": "#c8553d", "strided": "#588b8b"}


@dataclass(frozen=True)
class Reconstruction:
    """One photograph, merged and unmerged."""

    selection: str
    ratio: float
    tokens_before: int
    tokens_after: int
    psnr: float
    """Decibels against the original; higher is closer."""
    image: Tensor
    """[height, width, 3] in 0..1."""
    kept: Tensor
    """bool [rows, columns]: which tokens are destinations."""


def load_photograph(path: Path | None = None, size: int = 512) -> Tensor:
    """A photograph as [height, width, 3] in 0..1, its longer side at most `size`, cropped to whole patches.

    Args:
        path: an image file; None for the astronaut that scikit-image ships (NASA, public domain).
    """
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    if path is None:
        from skimage import data

        picture = Image.fromarray(data.astronaut())
    else:
        try:
            picture = Image.open(path).convert("RGB")
        except FileNotFoundError as error:
            raise UsageError(f"{str(path)!r} does not exist: give the path of an image file.") from error
        except (UnidentifiedImageError, IsADirectoryError) as error:
            raise UsageError(f"{str(path)!r} is not an image that can be read: give a PNG, JPEG or WebP.") from error
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    width, height = (side // PATCH * PATCH for side in picture.size)
    if min(width, height) < 2 * PATCH:
        raise UsageError(f"the image is {picture.width}×{picture.height}; each side needs at least {2 * PATCH} pixels.")
    return torch.from_numpy(np.asarray(picture.crop((0, 0, width, height)), dtype=np.float32) / 255)


def reconstructions(
    photograph: Tensor, config: ToMAConfig, ratios: Iterable[float] = RATIOS, selections: Iterable[str] = SELECTIONS
) -> Iterator[Reconstruction]:
    """Merge and unmerge the patches of `photograph`, once for every selection and ratio.

    Args:
        config: everything but selection and ratio is taken from it.
    """
    pixels, grid = _patchify(photograph)
    features = _comparable_by_cosine(pixels)
    for selection in selections:
        for ratio in ratios:
            settings = ToMAConfig.from_dict(config.to_dict() | {"selection": selection, "ratio": ratio})
            plan = MergePlan(grid, settings, batch_size=1)
            plan.update(features, Action.SELECT)
            image = _unpatchify(plan.unmerge(plan.merge(pixels)), grid)
            kept = torch.zeros(grid.num_tokens, dtype=torch.bool).index_fill_(0, plan.positions[0], True)
            yield Reconstruction(
                selection=selection,
                ratio=ratio,
                tokens_before=grid.num_tokens,
                tokens_after=plan.num_destinations,
                psnr=-10 * torch.log10((image - photograph).square().mean()).item(),
                image=image,
                kept=kept.reshape(grid.height, grid.width),
            )


def draw(photograph: Tensor, results: list[Reconstruction], title: str, path: Path) -> None:
    """One figure: the original, the destinations, and every reconstruction with its PSNR."""
    from matplotlib.figure import Figure

    selections = list(dict.fromkeys(result.selection for result in results))
    ratios = list(dict.fromkeys(result.ratio for result in results))
    by_cell = {(result.selection, result.ratio): result for result in results}
    rows, columns = 1 + len(selections), 1 + len(ratios)
    aspect = photograph.shape[0] / photograph.shape[1]
    figure = Figure(figsize=(3.3 * columns, 3.3 * aspect * rows + 1.2), layout="constrained")
    figure.suptitle(title, fontsize=13)
    axes: Any = figure.subplots(rows, columns, squeeze=False)

    _show(axes[0, 0], photograph, "original")
    for column, ratio in enumerate(ratios, start=1):
        result = by_cell[selections[0], ratio]
        heading = f"ratio {ratio:g}: {result.tokens_before} → {result.tokens_after} tokens"
        _show(axes[0, column], _mark_destinations(photograph, result.kept), heading)
        for row, selection in enumerate(selections, start=1):
            result = by_cell[selection, ratio]
            _show(axes[row, column], result.image, f"{selection}  {result.psnr:.1f} dB", _COLORS[selection])
    axes[0, 1].set_ylabel(f"destinations ({selections[0]})", fontsize=10)

    for axis in axes[1:, 0]:
        axis.remove()
    chart: Any = figure.add_subplot(axes[0, 0].get_gridspec()[1:, 0])
    for selection in selections:
        psnr = [by_cell[selection, ratio].psnr for ratio in ratios]
        chart.plot(ratios, psnr, marker="o", label=selection, color=_COLORS[selection])
    chart.set(xlabel="ratio of tokens removed", ylabel="PSNR, dB (higher is better)", xticks=ratios)
    chart.legend(frameon=False)
    chart.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def write_rows(results: list[Reconstruction], facts: dict[str, object], path: Path) -> None:
    """One CSV row per reconstruction, with `facts` about the run in each."""
    rows = [
        {
            "selection": result.selection,
            "ratio": result.ratio,
            "tokens_before": result.tokens_before,
            "tokens_after": result.tokens_after,
            "psnr_db": round(result.psnr, 3),
            **facts,
        }
        for result in results
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _patchify(photograph: Tensor) -> tuple[Tensor, Grid]:
    height, width, channels = photograph.shape
    grid = Grid(height // PATCH, width // PATCH)
    patches = photograph.reshape(grid.height, PATCH, grid.width, PATCH, channels).transpose(1, 2)
    return patches.reshape(1, grid.num_tokens, PATCH * PATCH * channels), grid


def _unpatchify(tokens: Tensor, grid: Grid) -> Tensor:
    patches = tokens.reshape(grid.height, grid.width, PATCH, PATCH, -1).transpose(1, 2)
    return patches.reshape(grid.height * PATCH, grid.width * PATCH, -1)


def _comparable_by_cosine(pixels: Tensor) -> Tensor:
    """Cosine does not see brightness: a dark and a bright patch of one colour would count as equal.

    A model's tokens are normalised and carry brightness in their direction. Pixels get there by centring them and
    adding one constant entry as long as a typical patch: cosine then falls with the distance between patches.
    """
    centred = pixels - pixels.mean(dim=(0, 1))
    constant = centred.norm(dim=-1, keepdim=True).mean().expand(*centred.shape[:-1], 1)
    return torch.cat([centred, constant], dim=-1)


def _mark_destinations(photograph: Tensor, kept: Tensor) -> Tensor:
    """Destinations in full colour, tokens that merge into them faded to white."""
    weight = kept.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)[:, :, None].float() * 0.85 + 0.15
    return photograph * weight + (1 - weight)


def _show(axis: Any, image: Tensor, title: str, color: str = "black") -> None:
    axis.imshow(image.clamp(0, 1).numpy())
    axis.set_title(title, fontsize=10, color=color)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
