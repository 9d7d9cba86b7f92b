"""A merge plan: which tokens are destinations, and how much of every token goes to each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError
from toma_diffusion.merge.assignment import Assignment, HardAssignment, SoftAssignment
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.regions import Grid, Regions, divides_frames
from toma_diffusion.merge.schedule import Action
from toma_diffusion.ops import regional
from toma_diffusion.ops.backend import Backend, backend_of, choose_backend
from toma_diffusion.ops.regional import Nearness


class Plan(ABC):
    """What hooks need from the plan of any method: the way from all tokens of a grid to fewer, and back."""

    grid: Grid

    @property
    @abstractmethod
    def num_destinations(self) -> int:
        """D: tokens of a sample after merging."""

    @property
    def is_identity(self) -> bool:
        """Whether no token is removed. Merging and unmerging then return their input."""
        return self.num_destinations == self.grid.num_tokens

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that are updated in place. They never move as long as the plan exists."""
        return []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def begin_call(self) -> None:  # noqa: B027 (a plan that never changes has nothing to do here)
        """Prepare for one call of the denoiser, outside compiled code."""

    def wants(self, action: Action) -> bool:
        """Whether `update` with this action would compute anything."""
        return False

    def update(self, tokens: Tensor, action: Action) -> None:  # noqa: B027
        """Update from the tokens [B, N, d] of this step, as the action says."""

    def forget(self) -> None:  # noqa: B027
        """Make the next `update` select again, whatever its action."""

    @abstractmethod
    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]."""

    @abstractmethod
    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, D, C] -> [B, N, C], added to the residual if there is one."""

    @abstractmethod
    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
        """Of a table with one row per grid position, such as RoPE, the rows of the merged tokens.

        `dim` is where its rows lie: [N, ...] -> [D, ...] if the samples share their destinations, else [B, D, ...]. A
        table with the batch in dimension 0 keeps its form: [B, ..., N, ...] -> [B, ..., D, ...].
        """

    @property
    def backends(self) -> dict[str, Backend]:
        """What runs each operator, and why not a kernel where there is one."""
        return {"merging": Backend("torch")}

    def multiplications(self, width: int) -> Multiplications | None:
        """What a block of that width costs with and without this plan, by the paper's formula; None if not known."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Where in the grid tokens are merged, or why none are, as text."""


class Multiplications(NamedTuple):
    """The paper's count for one block and one step."""

    whole: float
    """The block on all tokens."""
    reduced: float
    """The block on the merged tokens."""
    merging: float
    """One merging and unmerging."""
    selection: float
    """Selecting destinations, averaged over the schedule. Counted once per plan, like the weights."""
    weights: float

    @property
    def planning(self) -> float:
        return self.selection + self.weights


class MergePlan(Plan):
    """Destinations for a batch of token grids, and the assignment of all tokens to them.

    The tensors are allocated once and updated in place, so that many layers can share a plan, steps can reuse it, and
    compiled code and CUDA graphs can read it. With local assignment, the weights are stored as one small block per
    region, never as the whole N × D matrix.

    A subclass may choose other destinations (`choose`), or assign tokens in another way (`make_assignment`).

    Example:

    ```python
    >>> import torch
    >>> from toma_diffusion import Merge
    >>> from toma_diffusion.merge import Action, Grid, MergePlan
    >>> tokens = torch.randn(2, 64 * 64, 320)
    >>> plan = MergePlan(Grid(64, 64), Merge(ratio=0.5), batch_size=2)
    >>> plan.update(tokens, Action.SELECT)
    >>> plan.merge(tokens).shape
    torch.Size([2, 2048, 320])
    >>> plan.unmerge(plan.merge(tokens)).shape
    torch.Size([2, 4096, 320])
    ```

    Args:
        grid: the image tokens' rows and columns, and a video's frames.
        config: what concerns the plan is read: ratio, min_tokens, regions, similarity, weights, backend.
        batch_size: number of samples.
        parts: the batch is so many parts of the same pictures, one after another, such as the two halves of guidance.
            Samples of one picture share destinations and weights, by the mean of their similarities.
        dtype: of the weights; use that of the tokens.
        device: that of the tokens.
        joint: select one set of destinations for the whole batch, by the sum of the samples' gains. For models in which
            all samples share one position table. Otherwise every picture selects for itself, and a batch of four is
            identical to four batches of one, up to rounding.
    """

    def __init__(
        self,
        grid: Grid,
        config: Merge,
        *,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        parts: int = 1,
        joint: bool = False,
    ) -> None:
        if batch_size % parts:
            raise ValueError(f"a batch of {batch_size} samples cannot be {parts} parts of equal size.")
        if config.region_frames is not None and grid.frames == 1:
            raise UsageError(
                f"region_frames={config.region_frames} counts only for clips, and this is one picture: leave it out."
            )
        self.grid = grid
        self.config = config
        self.batch_size = batch_size
        self.parts = parts
        self.joint = joint
        self.dtype = dtype
        self.device = torch.device(device)
        self.nearness = Nearness(config.distance_weight, parts)
        region = _divide(grid, config)
        self.regions = region if config.num_regions is not None else region.subdivide(config.selection_size)
        """In which destinations are selected."""
        self.assign_regions = region if config.assign == "local" else Regions.divide(grid, "global")
        """In which tokens are assigned to them. The others divide these."""
        ratio = config.ratio if grid.num_tokens >= config.min_tokens else 0.0
        self.destinations_per_region = num_destinations(self.regions.size, ratio)
        self.backend = choose_backend(config.backend, self.device, dtype)

        pictures, count = batch_size // parts, self.assign_regions.count
        self.destinations = self._indices(pictures * count, self.num_destinations // count)
        """[B·R / parts, k]: indices of the destinations inside each region in which tokens are assigned."""
        self.positions = self._indices(batch_size, self.num_destinations)
        """[B, D]: row-major indices of the destinations in the grid, in the order of the merged tokens."""
        self.assignment = None if self.is_identity else self.make_assignment()
        self.has_destinations = False
        self.has_weights = False
        self._gradients: set[str] = set()
        """Of merging and unmerging, those that needed gradients when they last ran. Not recorded in compiled code."""
        if self.is_identity:
            self.positions.copy_(torch.arange(self.num_destinations, device=device))
            self.has_destinations = True

    def choose(self, tokens: Tensor) -> Tensor:
        """Destinations for [B, N, d]: indices inside each region, [B / parts, R, k], or [1, R, k] for all pictures."""
        return regional.select(
            tokens,
            self.destinations_per_region,
            self.regions.tiling,
            self.nearness,
            joint=self.joint,
            backend=self.backend,
        )

    def make_assignment(self, soft: type[SoftAssignment] = SoftAssignment) -> Assignment:
        """How tokens are assigned to destinations. Called once, if any token is removed."""
        regions, block_destinations = self.assign_regions, self.destinations.shape[1]
        shared: dict[str, Any] = {"nearness": self.nearness, "backend": self.backend, "device": self.device}
        if self.config.is_hard:
            return HardAssignment(regions, self.batch_size, block_destinations, **shared)
        return soft(regions, self.batch_size, block_destinations, scale=self.config.scale, dtype=self.dtype, **shared)

    @property
    def num_destinations(self) -> int:
        return self.regions.count * self.destinations_per_region

    @property
    def is_identity(self) -> bool:
        return self.destinations_per_region == self.regions.size

    @property
    def weights(self) -> Tensor:
        """A, [B·R, k, n]: how much of every token goes to each destination; with global assignment R = 1."""
        if self.assignment is None:
            raise RuntimeError("this plan merges nothing, so that it has no weights.")
        return self.assignment.matrix()

    @property
    def buffers(self) -> list[Tensor]:
        return [self.destinations, self.positions, *([] if self.assignment is None else self.assignment.buffers())]

    @property
    def backends(self) -> dict[str, Backend]:
        if self.assignment is None:
            return {}
        selection = backend_of("selection", self.backend, self.regions.tiling)
        return {"selection": selection} | self.assignment.backends(self._gradients)

    def multiplications(self, width: int) -> Multiplications:
        """7d²N + 2dN² for a block; N²d/R for a selection, NDd/R + Nd for weights, NDd/R for merging or unmerging."""
        config, tokens, destinations = self.config, self.grid.num_tokens, self.num_destinations
        whole, reduced = (7 * width**2 * count + 2 * width * count**2 for count in (tokens, destinations))
        if self.is_identity:
            return Multiplications(whole, whole, 0.0, 0.0, 0.0)
        matrix = width * tokens * destinations / self.assign_regions.count
        selection = tokens**2 * width / self.regions.count / config.select_every
        weights = (matrix + tokens * width) / min(config.reweighed_every, config.select_every)
        return Multiplications(whole, reduced, 2 * matrix, selection, weights)

    def describe(self) -> str:
        if self.grid.num_tokens < self.config.min_tokens:
            return f"left whole: fewer than min_tokens={self.config.min_tokens}"
        if self.is_identity:
            return f"left whole: {self.regions.describe()}, too small to remove {self.config.ratio:.0%} of it"
        if self.regions == self.assign_regions or self.config.assign == "global":
            return self.regions.describe()
        return f"{self.assign_regions.describe()}, selected in {self.regions.describe()}"

    def wants(self, action: Action) -> bool:
        """Whether `update` with this action would compute anything. What is missing is always computed."""
        return not self.is_identity and (action is not Action.REUSE or not self.has_weights)

    def update(self, tokens: Tensor, action: Action) -> None:
        """Update destinations and weights in place from tokens `[B, N, d]`, normalised for the first merged layer.

        What the plan does not have yet is computed in any case: a new plan selects even on REUSE.
        """
        self._check(tokens, self.grid.num_tokens)
        if self.assignment is None or not self.wants(action):
            return
        if action is Action.SELECT or not self.has_destinations:
            self.set_destinations(self.choose(tokens))
        self.assignment.update(tokens, self.destinations)
        self.has_weights = True

    def set_destinations(self, local: Tensor) -> None:
        """Store destinations, in the form in which `choose` returns them."""
        pictures = self.batch_size // self.parts
        per_picture = local.expand(pictures, self.regions.count, self.destinations_per_region)
        chosen = self.regions.inside(self.assign_regions, per_picture)
        self.positions.copy_(self.assign_regions.positions(chosen).repeat(self.parts, 1))
        self.destinations.copy_(chosen.reshape(self.destinations.shape))
        self.has_destinations = True

    def forget(self) -> None:
        self.has_weights = False
        self.has_destinations = self.is_identity

    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]: every destination becomes the weighted mean of the tokens merged into it."""
        self._check(tokens, self.grid.num_tokens)
        if self.assignment is None:
            return tokens
        self._ready("merging", tokens)
        return self.assignment.merge(tokens)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, D, C] -> [B, N, C]: every token takes the mean of its destinations, added to the residual if given."""
        self._check(merged, self.num_destinations)
        if residual is not None:
            self._check(residual, self.grid.num_tokens)
        if self.assignment is None:
            return merged if residual is None else residual + merged
        self._ready("unmerging", merged, residual)
        return self.assignment.unmerge(merged, residual)

    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
        if table.shape[dim] != self.grid.num_tokens:
            where = f" in dimension {dim}" if dim else ""
            raise ValueError(
                f"table has shape {list(table.shape)}; it needs a row{where} for each of {self._tokens_text()}."
            )
        if not self.has_destinations:
            raise RuntimeError("this plan has no destinations yet: call update(tokens, Action.SELECT) first.")
        return gather_rows(table, dim, self.positions[0] if self.joint else self.positions)

    def _ready(self, operator: str, *tensors: Tensor | None) -> None:
        """Raise if there are no weights yet; note whether the operator needs gradients."""
        if not self.has_weights:
            raise RuntimeError("this plan has no weights yet: call update(tokens, Action.SELECT) first.")
        if torch.compiler.is_compiling():
            return
        if regional.needs_gradient(*tensors):
            self._gradients.add(operator)
        else:
            self._gradients.discard(operator)

    def _indices(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _check(self, tokens: Tensor, length: int) -> None:
        if tokens.ndim != 3 or tokens.shape[:2] != (self.batch_size, length):
            raise ValueError(
                f"tokens have shape {list(tokens.shape)}; this plan is for [{self.batch_size}, {length}, width], "
                f"{self._tokens_text()}. Make a new MergePlan for another grid or batch."
            )
        if tokens.device != self.positions.device:
            raise ValueError(
                f"tokens are on {tokens.device}, this plan is on {self.positions.device}: blocks that lie on several "
                "devices cannot be merged. Put the whole model on one device."
            )

    def _tokens_text(self) -> str:
        return f"the {self.grid.num_tokens} tokens of a {self.grid.describe()} grid"


def why_first_frame_whole(grid: Grid, config: Merge) -> str | None:
    """Why the first frame of a grid is better left whole: the others can be divided over frames then. None if not.

    For videos whose first frame differs from the others anyway. A number of frames that can be divided stays as it is.
    """
    frames, asked = grid.frames, config.frames_of_region
    if config.region != "tile" or frames == 1 or divides_frames(frames, asked):
        return None
    others = grid.without_first_frame
    if others.num_tokens < config.min_tokens or _divide(others, config).depth == 1:
        return None
    return f"{frames} frames cannot be divided into regions of about {asked} frames, the other {frames - 1} can"


def _divide(grid: Grid, config: Merge) -> Regions:
    """The regions in which tokens merge."""
    return Regions.divide(
        grid, config.region, tokens=config.region_size, count=config.num_regions, frames=config.frames_of_region
    )


def gather_rows(table: Tensor, dim: int, rows: Tensor) -> Tensor:
    """The rows of a table that lie in `dim`: [D] for all samples alike, or [B, D] for each its own."""
    if rows.ndim == 1:
        return table.index_select(dim, rows)
    if dim == 0:
        return table[rows]
    shape = [len(rows), *table.shape[1:]]
    shape[dim] = rows.shape[1]
    aligned = rows.reshape([len(rows)] + [1] * (dim - 1) + [rows.shape[1]] + [1] * (table.ndim - dim - 1))
    return table.expand(len(rows), *table.shape[1:]).gather(dim, aligned.expand(shape))


def num_destinations(region_size: int, ratio: float) -> int:
    """k = n − floor(n · ratio), at least 1: destinations in a region."""
    return max(1, region_size - math.floor(round(region_size * ratio, 6)))  # 100 · 0.29 is 28.999999999999996
