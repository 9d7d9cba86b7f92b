"""A merge plan: which tokens are destinations, and how much of every token goes to each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from toma_diffusion.merge.assignment import Assignment, HardAssignment, SliceAssignment, SoftAssignment
from toma_diffusion.merge.config import ToMAConfig
from toma_diffusion.merge.regions import Grid, Regions, divides_frames
from toma_diffusion.merge.schedule import Action
from toma_diffusion.ops import regional
from toma_diffusion.ops.backend import choose_backend
from toma_diffusion.ops.regional import Backend, Nearness

_FIXED_SEED = 0
"""Fixed choices come from a separate generator: torch's random state is never changed."""
_WITHOUT_TOKENS = ("none", "slice")
"""Selections that do not depend on tokens, neither for destinations nor for weights."""


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
    def log_sizes(self) -> Tensor | None:
        """[B, D]: the logarithm of the number of tokens that each merged token stands for; None if nobody needs it."""
        return None

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

    def place(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """`tokens` with these rows in the places of the destinations."""
        raise NotImplementedError(f"{type(self).__name__} has no destinations.")

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
    planning: float
    """Selecting destinations and computing weights, averaged over the schedule. Counted once per plan."""


class MergePlan(Plan):
    """Destinations for a batch of token grids, and the assignment of all tokens to them.

    The tensors are allocated once and updated in place, so that many layers can share a plan, steps can reuse it, and
    compiled code and CUDA graphs can read it. With local assignment, the weights are stored as one small block per
    region, never as the whole N × D matrix.

    Example:

    ```python
    >>> import torch
    >>> from toma_diffusion import Action, Grid, MergePlan, ToMAConfig
    >>> tokens = torch.randn(2, 64 * 64, 320)
    >>> plan = MergePlan(Grid(64, 64), ToMAConfig(ratio=0.5), batch_size=2)
    >>> plan.update(tokens, Action.SELECT)
    >>> plan.merge(tokens).shape
    torch.Size([2, 2048, 320])
    >>> plan.unmerge(plan.merge(tokens)).shape
    torch.Size([2, 4096, 320])
    ```

    Args:
        grid: the image tokens' rows and columns, and a video's frames.
        config: what concerns the plan is read: ratio, min_tokens, selection, regions, similarity, weights, backend.
        batch_size: number of samples.
        parts: the batch is so many parts of the same pictures, one after another, such as the two halves of guidance.
            Samples of one picture share destinations and weights, by the mean of their similarities.
        dtype: of the weights; use that of the tokens.
        device: that of the tokens.
        joint: select one set of destinations for the whole batch, by the sum of the samples' gains. For models in which
            all samples share one position table. Otherwise every picture selects for itself, and a batch of four is
            identical to four batches of one, up to rounding.
        destinations_of: another plan of the same grid, batch and settings, which selects for both. This one computes
            only weights, from its own tokens.
    """

    def __init__(
        self,
        grid: Grid,
        config: ToMAConfig,
        *,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        parts: int = 1,
        joint: bool = False,
        destinations_of: MergePlan | None = None,
    ) -> None:
        if batch_size % parts:
            raise ValueError(f"a batch of {batch_size} samples cannot be {parts} parts of equal size.")
        self.grid = grid
        self.config = config
        self.batch_size = batch_size
        self.parts = parts
        self.joint = joint
        in_time = config.distance_weight if config.frame_weight is None else config.frame_weight
        self.nearness = Nearness(config.distance_weight, parts, in_time)
        region = _divide(grid, config)
        self.regions = region if config.num_regions is not None else region.subdivide(config.selection_tokens)
        """In which destinations are selected."""
        self.assign_regions = region if config.assign == "local" else Regions.divide(grid, "global")
        """In which tokens are assigned to them. The others divide these."""
        ratio = config.ratio if grid.num_tokens >= config.min_tokens else 0.0
        self.destinations_per_region = num_destinations(self.regions.size, ratio)

        self.backend = choose_backend(config.backend, torch.device(device), dtype)

        block_destinations = self.num_destinations // self.assign_regions.count
        self._selector = destinations_of or self
        """The plan that selects: this one, or another that runs before it."""
        shape = (batch_size // parts * self.assign_regions.count, block_destinations)
        self.destinations: Tensor = _share("destinations", destinations_of, shape, device)
        """[B·R / parts, k]: indices of the destinations inside each region in which tokens are assigned."""
        self.positions: Tensor = _share("positions", destinations_of, (batch_size, self.num_destinations), device)
        """[B, D]: row-major indices of the destinations in the grid, in the order of the merged tokens."""
        self.assignment = self._make_assignment(block_destinations, dtype, device)
        self._log_sizes: Tensor | None = None
        if config.size_aware_attention and not isinstance(self.assignment, SliceAssignment):
            self._log_sizes = torch.zeros(batch_size, self.num_destinations, dtype=dtype, device=device)
        self._has_destinations = False
        self._has_weights = False
        self.saw_gradients = False
        """Whether a merge needed gradients. Not recorded in compiled code."""

        if self.is_identity or config.selection == "slice":
            self.positions.copy_(torch.arange(self.num_destinations, device=device))
            self._has_destinations = True
        elif config.selection != "facility-location":
            count = self.destinations_per_region
            self._set_destinations(_fixed_choice(config.selection, self.regions, count, device))
        if config.selection in _WITHOUT_TOKENS and not self.is_identity:
            self.assignment.fix()
            self._set_log_sizes()
            self._has_weights = True

    def _make_assignment(self, block_destinations: int, dtype: torch.dtype, device: torch.device | str) -> Assignment:
        config, regions = self.config, self.assign_regions
        if self.is_identity or config.selection == "slice":
            return SliceAssignment(self.grid.num_tokens, self.num_destinations)
        if config.is_hard:
            return HardAssignment(
                regions,
                self.batch_size,
                block_destinations,
                nearness=self.nearness,
                backend=self.backend,
                device=device,
            )
        return SoftAssignment(
            regions,
            self.batch_size,
            block_destinations,
            scale=config.scale,
            unmerge=config.unmerge,
            nearness=self.nearness,
            backend=self.backend,
            dtype=dtype,
            device=device,
        )

    @property
    def num_destinations(self) -> int:
        """D: tokens of a sample after merging."""
        return self.regions.count * self.destinations_per_region

    @property
    def is_identity(self) -> bool:
        """Whether every token is its own destination: merging and unmerging then return their input as it is."""
        return self.destinations_per_region == self.regions.size

    @property
    def weights(self) -> Tensor:
        """A, [B·R, k, n]: how much of every token goes to each destination; with global assignment R = 1."""
        return self.assignment.matrix()

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors of the plan but those of another; their addresses never change."""
        chosen = [self.destinations, self.positions] if self._selector is self else []
        sizes = [] if self._log_sizes is None else [self._log_sizes]
        return [*chosen, *sizes, *self.assignment.buffers()]

    @property
    def log_sizes(self) -> Tensor | None:
        """[B, D]; None unless `size_aware_attention` is set and tokens are merged."""
        return self._log_sizes

    @property
    def num_bytes(self) -> int:
        """Memory held by the plan."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def backends(self) -> dict[str, Backend]:
        """What runs each operator, and why not a kernel where there is one."""
        found = regional.backends(self.backend, self.regions.size, self.assign_regions.size, self.assign_regions.count)
        if self.saw_gradients and found["merging"].name != "torch":
            found["merging"] = Backend("torch", "gradients were needed, and the kernels have no backward pass")
        return found

    def multiplications(self, width: int) -> Multiplications:
        """7d²N + 2dN² for a block; N²d/R for a selection, NDd/R + Nd for weights, NDd/R for merging or unmerging."""
        config, tokens, destinations = self.config, self.grid.num_tokens, self.num_destinations
        whole, reduced = (7 * width**2 * count + 2 * width * count**2 for count in (tokens, destinations))
        if self.is_identity:
            return Multiplications(whole, whole, 0.0, 0.0)
        matrix = width * tokens * destinations / self.assign_regions.count
        if config.selection in _WITHOUT_TOKENS:
            return Multiplications(whole, reduced, 2 * matrix, 0.0)
        selects = config.selection == "facility-location" and self._selector is self
        selection = tokens**2 * width / self.regions.count if selects else 0
        weights = (matrix + tokens * width) / min(config.reweigh_every, config.select_every)
        return Multiplications(whole, reduced, 2 * matrix, selection / config.select_every + weights)

    def describe(self) -> str:
        """The regions in which destinations are selected, or why none are."""
        if self.grid.num_tokens < self.config.min_tokens:
            return f"left whole: fewer than min_tokens={self.config.min_tokens}"
        if self.is_identity and self.config.ratio:
            return f"left whole: {self.regions.describe()}, too small to remove {self.config.ratio:.0%} of it"
        if self.regions == self.assign_regions or self.config.assign == "global":
            return self.regions.describe()
        return f"{self.assign_regions.describe()}, selected in {self.regions.describe()}"

    def wants(self, action: Action) -> bool:
        """Whether `update` with this action would compute anything. What is missing is always computed."""
        if self.is_identity or self.config.selection in _WITHOUT_TOKENS:
            return False
        return action is not Action.REUSE or not self._has_weights

    def update(self, tokens: Tensor, action: Action) -> None:
        """Update destinations and weights in place, as the action says.

        What the plan does not have yet is computed in any case: a new plan selects even on REUSE.

        Args:
            tokens: `[B, N, d]`, normalised as the first merged layer sees them.
        """
        self._check(tokens, self.grid.num_tokens)
        if not self.wants(action):
            return
        if self.config.selection == "facility-location" and self._must_select(action):
            self._set_destinations(self._choose(tokens))
        self.assignment.update(tokens, self.destinations)
        self._set_log_sizes()
        self._has_weights = True

    def _must_select(self, action: Action) -> bool:
        """A plan that uses another's destinations selects only if that one never did: its blocks may be left out."""
        selects = action is Action.SELECT and self._selector is self
        return selects or not self._selector._has_destinations

    def forget(self) -> None:
        """Make the next `update` select again, whatever its action. Fixed choices are kept."""
        if self.is_identity or self.config.selection in _WITHOUT_TOKENS:
            return
        self._has_weights = False
        self._has_destinations = self.config.selection != "facility-location"

    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]: every destination becomes the weighted mean of the tokens merged into it."""
        self._check(tokens, self.grid.num_tokens)
        if not torch.compiler.is_compiling() and regional.needs_gradient(tokens):
            self.saw_gradients = True
        if self.is_identity:
            return tokens
        assignment = self._ready_assignment()
        merged = assignment.merge(tokens)
        if not self.config.norm_preserving:
            return merged
        lengths = assignment.merge(_lengths(tokens))  # the mean length of every cluster
        return merged * (lengths / _lengths(merged).clamp_min(torch.finfo(torch.float32).tiny)).to(merged.dtype)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, D, C] -> [B, N, C]: every token takes the mean of its destinations, added to the residual if given."""
        self._check(merged, self.num_destinations)
        if residual is not None:
            self._check(residual, self.grid.num_tokens)
        if self.is_identity:
            return merged if residual is None else residual + merged
        return self._ready_assignment().unmerge(merged, residual)

    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
        """The destinations' rows of a table with one row per grid position, such as RoPE."""
        if table.shape[dim] != self.grid.num_tokens:
            where = f" in dimension {dim}" if dim else ""
            raise ValueError(
                f"table has shape {list(table.shape)}; it needs a row{where} for each of {self._tokens_text()}."
            )
        if not self._selector._has_destinations:
            raise RuntimeError("this plan has no destinations yet: call update(tokens, Action.SELECT) first.")
        return gather_rows(table, dim, self.positions[0] if self.joint else self.positions)

    def place(self, tokens: Tensor, rows: Tensor) -> Tensor:
        """`tokens` with these rows in the places of the destinations."""
        index = self.positions[:, :, None].expand(-1, -1, tokens.shape[2])
        return tokens.scatter(1, index, rows.to(tokens.dtype))

    def _choose(self, tokens: Tensor) -> Tensor:
        """[B, N, d] -> [B / parts, R, k], or [1, R, k] if joint: indices inside each region."""
        return regional.select(
            tokens,
            self.destinations_per_region,
            self.regions.tiling,
            self.nearness,
            joint=self.joint,
            backend=self.backend,
        )

    def _set_destinations(self, local: Tensor) -> None:
        """Store [B / parts, R, k], or [R, k] for all samples, indices inside each region."""
        pictures = self.batch_size // self.parts
        per_picture = local.expand(pictures, self.regions.count, self.destinations_per_region)
        chosen = self.regions.inside(self.assign_regions, per_picture)
        self.positions.copy_(self.assign_regions.positions(chosen).repeat(self.parts, 1))
        self.destinations.copy_(chosen.reshape(self.destinations.shape))
        self._selector._has_destinations = True

    def _set_log_sizes(self) -> None:
        if self._log_sizes is not None:
            sizes = self.assignment.sizes().clamp_min(torch.finfo(torch.float32).tiny)
            self._log_sizes.copy_(sizes.log().reshape(self._log_sizes.shape))

    def _ready_assignment(self) -> Assignment:
        if not self._has_weights:
            raise RuntimeError("this plan has no weights yet: call update(tokens, Action.SELECT) first.")
        return self.assignment

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


def why_first_frame_whole(grid: Grid, config: ToMAConfig) -> str | None:
    """Why the first frame of a grid is better left whole: the others can be divided over frames then. None if not.

    For videos whose first frame differs from the others anyway. A number of frames that can be divided stays as it is.
    """
    frames, asked = grid.frames, config.region_frames
    if not config.ratio or config.region != "tile" or frames == 1 or divides_frames(frames, asked):
        return None
    others = grid.without_first_frame
    if others.num_tokens < config.min_tokens or _divide(others, config).depth == 1:
        return None
    return f"{frames} frames cannot be divided into regions of about {asked} frames, the other {frames - 1} can"


def _divide(grid: Grid, config: ToMAConfig) -> Regions:
    """The regions in which tokens merge."""
    return Regions.divide(
        grid, config.region, tokens=config.region_tokens, count=config.num_regions, frames=config.region_frames
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


def _share(name: str, other: MergePlan | None, shape: tuple[int, int], device: torch.device | str) -> Tensor:
    """The buffer of that name of the other plan, or a new one."""
    shared: Tensor = getattr(other, name) if other is not None else torch.zeros(shape, dtype=torch.int64, device=device)
    return shared


def _lengths(tokens: Tensor) -> Tensor:
    """[B, N, C] -> float32 [B, N, 1]."""
    lengths: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=torch.float32)
    return lengths


def _fixed_choice(selection: str, regions: Regions, count: int, device: torch.device | str) -> Tensor:
    """[R, k]: a choice that does not depend on the tokens: at random, or strided."""
    if selection == "strided":
        choice = (torch.arange(count) * regions.size // count).expand(regions.count, -1)
    else:
        generator = torch.Generator().manual_seed(_FIXED_SEED)
        choice = torch.rand(regions.count, regions.size, generator=generator).argsort(dim=-1)[:, :count]
    return choice.to(device)
