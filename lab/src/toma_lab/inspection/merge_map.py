"""Which tokens of an image are destinations, and which token was merged into which, over the steps of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toma_diffusion import Handle, UsageError
from toma_diffusion.engine.install import find_root
from toma_diffusion.merge import Grid, MergePlan
from toma_diffusion.merge.state import MergeState
from toma_lab.inspection.figures import choose_evenly, new_figure, show, shrink

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_COLUMNS = 5
_FADED = 0.18
"""How much of its colour a merged token keeps in the figure."""
_PIXELS = 12
"""Side of a token in the figure, in pixels."""


@dataclass(frozen=True)
class MergeMap:
    """The plan of one kind of block after one step, for the last sample: with guidance the one with the prompt."""

    kind: str
    step: int
    grid: Grid
    targets: Tensor
    """[N]: the grid position that each token is merged into. For a destination, its own."""

    @property
    def kept(self) -> Tensor:
        """bool [N]: which tokens are destinations."""
        kept = torch.zeros(self.grid.num_tokens, dtype=torch.bool)
        return kept.index_fill_(0, self.targets, True)


@dataclass(eq=False)
class MergeMapRecorder:
    """Records the plans of a merged model whenever they changed. Pass it to `generate_image` as `on_step`."""

    handle: Handle
    maps: list[MergeMap] = field(default_factory=list)

    def __call__(self, step: int) -> None:
        """Record the plans that this step used, if they are new."""
        root = find_root(self.handle.model)
        if root is None or not isinstance(state := root.inside, MergeState) or not state.active:
            return
        for kind in dict.fromkeys(slot.kind for slot in state.slots):
            plan = state.plan_of(kind)
            if not isinstance(plan, MergePlan):
                raise UsageError(f"{state.config.label} has no destinations to show: use ToMA.")
            last = next((known for known in reversed(self.maps) if known.kind == kind), None)
            targets = targets_of(plan)
            if last is None or not torch.equal(last.targets, targets):
                self.maps.append(MergeMap(kind, step, plan.grid, targets))


def targets_of(plan: MergePlan) -> Tensor:
    """[N]: for each token of the last sample, the grid position of the destination that gets most of it."""
    if plan.is_identity:
        return torch.arange(plan.grid.num_tokens)
    regions = plan.assign_regions
    slots = plan.weights[-regions.count :].argmax(dim=1).cpu()  # [R, n]
    merged = slots + torch.arange(regions.count)[:, None] * plan.weights.shape[1]
    return plan.positions[-1].cpu()[regions.join(merged[:, :, None])[0, :, 0]]


def plot_merge_maps(image: Image, maps: Sequence[MergeMap], title: str = "") -> Any:
    """A figure with two rows for each kind of block: destinations in full colour; lines from tokens to them."""
    kinds = list(dict.fromkeys(one.kind for one in maps))
    chosen = {kind: choose_evenly([one for one in maps if one.kind == kind], MOST_COLUMNS) for kind in kinds}
    columns = max(len(found) for found in chosen.values())
    size = (2.9 * columns + 0.6, 2 * len(kinds) * 2.95 * image.height / image.width + 0.8)
    figure, axes = new_figure(title, size, 2 * len(kinds), columns)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, kind in enumerate(kinds):
        for column, found in enumerate(chosen[kind]):
            before, after = found.grid.num_tokens, int(found.kept.sum())
            heading = f"{kind}, from step {found.step}\n{before} → {after} tokens"
            show(axes[2 * row, column], _faded(image, found).numpy(), heading)
            _plot_lines(axes[2 * row + 1, column], image, found)
    return figure


def _faded(image: Image, found: MergeMap) -> Tensor:
    colors = shrink(image, found.grid)
    weight = torch.where(found.kept, 1.0, _FADED).reshape(found.grid.height, found.grid.width, 1)
    return colors * weight + (1 - weight)


def _plot_lines(axis: Any, image: Image, found: MergeMap) -> None:
    from matplotlib.collections import LineCollection

    grid, positions = found.grid, torch.arange(found.grid.num_tokens)
    axis.imshow(image.resize((grid.width * _PIXELS, grid.height * _PIXELS)), extent=(0, grid.width, grid.height, 0))
    axis.imshow([[1.0]], cmap="gray", vmin=0, vmax=1, alpha=0.45, extent=(0, grid.width, grid.height, 0))

    def centres(of: Tensor) -> Tensor:
        return torch.stack([of % grid.width, of // grid.width], dim=-1) + 0.5

    moved = positions[positions != found.targets]
    lines = torch.stack([centres(moved), centres(found.targets[moved])], dim=1)
    axis.add_collection(LineCollection(lines.tolist(), colors="#b3261e", linewidths=0.7, alpha=0.7))
    kept = centres(positions[found.kept])
    axis.scatter(kept[:, 0], kept[:, 1], s=36 / max(grid.width, 12), color="#0b3d91", linewidths=0, zorder=3)
    axis.set(xlim=(0, grid.width), ylim=(grid.height, 0))
