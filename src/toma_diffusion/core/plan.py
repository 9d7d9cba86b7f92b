"""A merge plan: which tokens are destinations, and how much of every token goes to each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toma_diffusion import ops
from toma_diffusion.config import ToMAConfig
from toma_diffusion.core.regions import Grid, Regions
from toma_diffusion.core.schedule import Action

_FIXED_SEED = 0
"""Fixed choices (`random`, `none`) come from a generator of their own: the user's random state is never touched."""


class MergePlan:
    """Destinations and weights for a batch of token grids, and the merging and unmerging they define.

    The tensors are allocated once and updated in place, so a plan can be shared by many layers, reused over steps,
    and held by compiled code and CUDA graphs. With local assignment the weights are stored as one small block per
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
        grid: the image tokens' rows and columns.
        config: ratio, selection, region, num_regions, assign, scale and unmerge are read.
        batch_size: number of samples.
        dtype: of the weights; take that of the tokens.
        device: of the tokens.
        joint: choose one set of destinations for the whole batch, by the sum of the samples' gains. For models in which
            one position table serves all samples. Otherwise every sample chooses for itself, and a batch of four
            equals four batches of one.
    """

    def __init__(
        self,
        grid: Grid,
        config: ToMAConfig,
        *,
        batch_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        joint: bool = False,
    ) -> None:
        self.grid = grid
        self.config = config
        self.batch_size = batch_size
        self.joint = joint
        self.regions = Regions.divide(grid, config.region, config.num_regions)
        self.assign_regions = self.regions if config.assign == "local" else Regions.divide(grid, "global")
        self.destinations_per_region = num_destinations(self.regions.size, config.ratio)

        blocks = batch_size * self.assign_regions.count
        block_destinations = self.num_destinations // self.assign_regions.count
        weights_shape = (0 if self.is_identity else blocks, block_destinations, self.assign_regions.size)
        self.destinations = torch.zeros(blocks, block_destinations, dtype=torch.int64, device=device)
        """[B·R, k]: indices of the destinations inside each block of `weights`."""
        self.positions = torch.zeros(batch_size, self.num_destinations, dtype=torch.int64, device=device)
        """[B, D]: row-major indices of the destinations in the grid, in the order of the merged tokens."""
        self.weights = torch.zeros(weights_shape, dtype=dtype, device=device)
        """[B·R, k, n]: A, one block per region; with global assignment R = 1. Nothing where nothing is merged."""
        self._has_destinations = False
        self._has_weights = False

        if self.is_identity:
            self.positions.copy_(torch.arange(grid.num_tokens, device=device))
            self._has_destinations = True
        elif config.selection != "facility-location":
            self._set_destinations(_fixed_choice(config.selection, self.regions, self.destinations_per_region, device))
        if config.selection == "none" and not self.is_identity:
            generator = torch.Generator().manual_seed(_FIXED_SEED)
            self.weights.copy_(torch.randn(self.weights.shape[1:], generator=generator).softmax(dim=-2))
            self._has_weights = True

    @property
    def num_destinations(self) -> int:
        """D: tokens of a sample after merging."""
        return self.regions.count * self.destinations_per_region

    @property
    def is_identity(self) -> bool:
        """Whether every token is its own destination: merging and unmerging then return their input as it is."""
        return self.destinations_per_region == self.regions.size

    @property
    def num_bytes(self) -> int:
        """Memory held by the plan."""
        return sum(buffer.nbytes for buffer in (self.destinations, self.positions, self.weights))

    def wants(self, action: Action) -> bool:
        """Whether `update` with this action would compute anything: what is missing is computed whatever the action."""
        if self.is_identity or self.config.selection == "none":
            return False
        return action is not Action.REUSE or not self._has_weights

    def update(self, tokens: Tensor, action: Action) -> None:
        """Do what the schedule says with the tokens of this step, in place.

        What the plan does not have yet is computed whatever the action: a fresh plan selects even on REUSE.

        Args:
            tokens: `[B, N, d]`, normalised as the first merged layer sees them.
        """
        self._check(tokens, self.grid.num_tokens)
        if not self.wants(action):
            return
        if self.config.selection == "facility-location" and (action is Action.SELECT or not self._has_destinations):
            self._set_destinations(self._choose(tokens))
        split = self.assign_regions.split(tokens)
        self.weights.copy_(ops.merge_weights(split, self.destinations, self.config.scale))
        self._has_weights = True

    def forget(self) -> None:
        """Make the next `update` choose anew whatever its action. What is fixed stays."""
        if self.is_identity or self.config.selection == "none":
            return
        self._has_weights = False
        self._has_destinations = self.config.selection != "facility-location"

    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]: every destination becomes the weighted mean of the tokens merged into it."""
        self._check(tokens, self.grid.num_tokens)
        if self.is_identity:
            return tokens
        merged = ops.merge(self.assign_regions.split(tokens), self._ready_weights())  # [B·R, k, C]
        return merged.reshape(self.batch_size, self.num_destinations, -1)

    def unmerge(self, merged: Tensor) -> Tensor:
        """[B, D, C] -> [B, N, C]: every token takes the mean of its destinations."""
        self._check(merged, self.num_destinations)
        if self.is_identity:
            return merged
        blocks = merged.reshape(*self.destinations.shape, -1)  # [B·R, k, C]
        return self.assign_regions.join(ops.unmerge(blocks, self._ready_weights(), self.config.unmerge))

    def gather(self, table: Tensor) -> Tensor:
        """The destinations' rows of a table with one row per grid position, such as RoPE.

        [N, ...] -> [D, ...] if the samples share their destinations, else [B, D, ...].
        """
        if table.shape[0] != self.grid.num_tokens:
            raise ValueError(f"table has shape {list(table.shape)}; it needs a row for each of {self._tokens_text()}.")
        if not self._has_destinations:
            raise RuntimeError("this plan has no destinations yet: call update(tokens, Action.SELECT) first.")
        return table[self.positions[0] if self.joint else self.positions]

    def _choose(self, tokens: Tensor) -> Tensor:
        """[B, N, d] -> [B, R, k], or [1, R, k] if joint: indices inside each region."""
        similarity = ops.cosine_similarity(self.regions.split(tokens))  # [B·R, n, n]
        size, count = self.regions.size, self.regions.count
        if self.joint:  # candidates of a region × that region's tokens in all samples, side by side
            similarity = similarity.reshape(self.batch_size, count, size, size).permute(1, 2, 0, 3).flatten(2)
        picks = ops.facility_location(similarity, self.destinations_per_region)
        return picks.reshape(-1, count, self.destinations_per_region)

    def _set_destinations(self, local: Tensor) -> None:
        """Store [B, R, k], or [R, k] for all samples, indices inside each region."""
        self.positions.copy_(self.regions.positions(local))
        if self.assign_regions is self.regions:
            per_sample = local.expand(self.batch_size, self.regions.count, self.destinations_per_region)
            self.destinations.copy_(per_sample.reshape(self.destinations.shape))
        else:
            self.destinations.copy_(self.positions)
        self._has_destinations = True

    def _ready_weights(self) -> Tensor:
        if not self._has_weights:
            raise RuntimeError("this plan has no weights yet: call update(tokens, Action.SELECT) first.")
        return self.weights

    def _check(self, tokens: Tensor, length: int) -> None:
        if tokens.ndim != 3 or tokens.shape[:2] != (self.batch_size, length):
            raise ValueError(
                f"tokens have shape {list(tokens.shape)}; this plan is for [{self.batch_size}, {length}, width], "
                f"{self._tokens_text()}. Make a new MergePlan for another grid or batch."
            )

    def _tokens_text(self) -> str:
        return f"the {self.grid.num_tokens} tokens of a {self.grid.height}×{self.grid.width} grid"


def num_destinations(region_size: int, ratio: float) -> int:
    """k = n − floor(n · ratio), at least 1: tokens of a region that stay."""
    return max(1, region_size - math.floor(round(region_size * ratio, 6)))  # 100 · 0.29 is 28.999999999999996


def _fixed_choice(selection: str, regions: Regions, count: int, device: torch.device | str) -> Tensor:
    """[R, k]: a choice that does not look at the tokens."""
    if selection == "strided":
        choice = (torch.arange(count) * regions.size // count).expand(regions.count, -1)
    else:
        generator = torch.Generator().manual_seed(_FIXED_SEED)
        choice = torch.rand(regions.count, regions.size, generator=generator).argsort(dim=-1)[:, :count]
    return choice.to(device)
