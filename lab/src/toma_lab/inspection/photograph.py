"""Token merging shown on one image, with its patches as tokens.

Three ways to choose destinations are compared at three ratios. Merging and unmerging are the same for all three. The
difference between the reconstruction and the original is what merging loses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from toma_diffusion import Merge, UsageError
from toma_diffusion.merge import Action, Grid, MergePlan
from toma_lab.bounds import fixed_choice
from toma_lab.inspection.figures import new_figure, show

PATCH = 8
"""Side of a token in pixels: the part of an image that one token of a Stable Diffusion latent covers."""
RATIOS = (0.25, 0.5, 0.75)
SELECTIONS = ("facility-location", "random", "strided")
SAMPLE = Path(__file__).with_name("assets") / "sample.jpg"
"""The image that is used if the user gives none: an owl, a butterfly, a parrot and an astronaut that the demo model
generated ("3d emoji of …", seed 3, 30 steps, guidance 4), on a background of our own."""

_COLORS = {"facility-location": "#0b6e4f", "random": "#c8553d", "strided": "#588b8b"}


@dataclass(frozen=True)
class Reconstruction:
    """The image after merging and unmerging."""

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

    @property
    def row(self) -> dict[str, object]:
        names = ("selection", "ratio", "tokens_before", "tokens_after")
        return {name: getattr(self, name) for name in names} | {"psnr_db": round(self.psnr, 3)}


def load_photograph(path: Path | None = None, size: int = 512) -> Tensor:
    """Read an image as [height, width, 3] in 0..1, its longer side at most `size`, cropped to whole patches.

    Args:
        path: an image file. Defaults to an image that comes with this package.
        size: in pixels.
    """
    import numpy as np
    from PIL import Image

    try:
        picture = Image.open(path or SAMPLE).convert("RGB")
    except FileNotFoundError as error:
        raise UsageError(f"{str(path)!r} does not exist: give the path of an image file.") from error
    except OSError as error:  # a folder, not an image, cut short, not readable
        raise UsageError(f"{str(path)!r} cannot be read as an image: give a PNG, JPEG or WebP file.") from error
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    width, height = (side // PATCH * PATCH for side in picture.size)
    if min(width, height) < 2 * PATCH:
        raise UsageError(f"the image is {picture.width}×{picture.height} pixels: each side needs at least {2 * PATCH}.")
    return torch.from_numpy(np.asarray(picture.crop((0, 0, width, height)), dtype=np.float32) / 255)


def reconstructions(
    photograph: Tensor, config: Merge, ratios: Iterable[float] = RATIOS, selections: Iterable[str] = SELECTIONS
) -> Iterator[Reconstruction]:
    """Merge and unmerge the patches of `photograph`, once for each selection and ratio.

    Args:
        photograph: [height, width, 3] in 0..1, in whole patches.
        config: all other settings.
        ratios: fractions of the tokens to remove.
        selections: ways to choose destinations.
    """
    pixels, grid = _patchify(photograph)
    features = _comparable_by_cosine(pixels)
    for selection in selections:
        for ratio in ratios:
            plan = MergePlan(grid, replace(config, ratio=ratio), batch_size=1)
            if selection == "facility-location":
                plan.update(features, Action.SELECT)
            else:
                plan.set_destinations(fixed_choice(selection, plan.regions, plan.destinations_per_region))
                plan.update(features, Action.REWEIGH)
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


def plot_reconstructions(photograph: Tensor, results: list[Reconstruction], title: str, path: Path) -> None:
    """Write one figure: the original, the destinations, and every reconstruction with its PSNR."""
    by_cell = {(result.selection, result.ratio): result for result in results}
    selections, ratios = (list(dict.fromkeys(each)) for each in zip(*by_cell, strict=True))
    rows, columns = 1 + len(selections), 1 + len(ratios)
    aspect = photograph.shape[0] / photograph.shape[1]
    figure, axes = new_figure(title, (3.3 * columns, 3.3 * aspect * rows + 1.2), rows, columns)

    show(axes[0, 0], photograph.numpy(), "original")
    for column, ratio in enumerate(ratios, start=1):
        result = by_cell[selections[0], ratio]
        heading = f"ratio {ratio:g}: {result.tokens_before} → {result.tokens_after} tokens"
        show(axes[0, column], _mark_destinations(photograph, result.kept).numpy(), heading)
        for row, selection in enumerate(selections, start=1):
            result = by_cell[selection, ratio]
            heading = f"{selection}  {result.psnr:.1f} dB"
            show(axes[row, column], result.image.clamp(0, 1).numpy(), heading, _COLORS[selection])
    axes[0, 1].set_ylabel(f"destinations ({selections[0]})", fontsize=10)

    for axis in axes[1:, 0]:
        axis.remove()
    chart = figure.add_subplot(axes[0, 0].get_gridspec()[1:, 0])
    for selection in selections:
        psnr = [by_cell[selection, ratio].psnr for ratio in ratios]
        chart.plot(ratios, psnr, marker="o", label=selection, color=_COLORS[selection])
    chart.set(xlabel="ratio of tokens removed", ylabel="PSNR, dB (higher is better)", xticks=ratios)
    chart.legend(frameon=False)
    chart.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _patchify(photograph: Tensor) -> tuple[Tensor, Grid]:
    height, width, channels = photograph.shape
    grid = Grid(height // PATCH, width // PATCH)
    patches = photograph.reshape(grid.height, PATCH, grid.width, PATCH, channels).transpose(1, 2)
    return patches.reshape(1, grid.num_tokens, PATCH * PATCH * channels), grid


def _unpatchify(tokens: Tensor, grid: Grid) -> Tensor:
    patches = tokens.reshape(grid.height, grid.width, PATCH, PATCH, -1).transpose(1, 2)
    return patches.reshape(grid.height * PATCH, grid.width * PATCH, -1)


def _comparable_by_cosine(pixels: Tensor) -> Tensor:
    """Turn pixels into features whose cosine falls with the distance between patches.

    The cosine of raw pixels ignores brightness: a dark and a bright patch of one colour would count as equal. Centring
    the pixels and adding one constant entry as long as a typical patch corrects this.
    """
    centred = pixels - pixels.mean(dim=(0, 1))
    constant = centred.norm(dim=-1, keepdim=True).mean().expand(*centred.shape[:-1], 1)
    return torch.cat([centred, constant], dim=-1)


def _mark_destinations(photograph: Tensor, kept: Tensor) -> Tensor:
    """Destinations in full colour, merged tokens faded to white."""
    weight = kept.repeat_interleave(PATCH, 0).repeat_interleave(PATCH, 1)[:, :, None].float() * 0.85 + 0.15
    return photograph * weight + (1 - weight)
