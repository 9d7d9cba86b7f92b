"""How tokens are assigned to destinations: by a matrix, by an index, or not at all.

Every assignment has fixed buffers that are updated in place. `update` reads tokens [B, N, d] and destinations, `merge`
turns [B, N, C] into [B, D, C], and `unmerge` the reverse, added to a residual if one is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from toma_diffusion import ops
from toma_diffusion.merge.regions import Regions
from toma_diffusion.ops import regional
from toma_diffusion.ops.regional import Nearness

_FIXED_SEED = 0
"""Fixed choices come from a separate generator: torch's random state is never changed."""


class Assignment(ABC):
    """Assigns all tokens of a grid to their destinations."""

    @abstractmethod
    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Assign [B, N, d] to destinations [B·R / parts, k], which are indices inside each region."""

    @abstractmethod
    def fix(self) -> None:
        """Set a fixed random assignment, which does not depend on tokens."""

    @abstractmethod
    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]."""

    @abstractmethod
    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, D, C] -> [B, N, C], added to the residual if there is one."""

    @abstractmethod
    def sizes(self) -> Tensor:
        """How many tokens each merged token stands for, the sum of their weights: float32 [B·D] in the order of merged
        tokens."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """A written out, [B·R, k, n]: how much of every token goes to each destination of its region."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors that it holds."""


class SoftAssignment(Assignment):
    """By a matrix: A, columns summing to 1, and M = A / row sums; a block of them per region."""

    def __init__(
        self,
        regions: Regions,
        batch_size: int,
        block_destinations: int,
        *,
        scale: float,
        unmerge: str,
        nearness: Nearness,
        backend: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.regions = regions
        self.nearness = nearness
        self.scale = scale
        self.method = unmerge
        self.backend = backend
        shape = (batch_size * regions.count, block_destinations, regions.size)
        self.weights = torch.zeros(shape, dtype=dtype, device=device)
        """A, [B·R, k, n]."""
        self.means = torch.zeros(shape, dtype=dtype, device=device)
        """M, [B·R, k, n]."""

    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Compute A and M from this step's tokens."""
        regional.weigh(
            tokens,
            destinations,
            self.regions.tiling,
            self.nearness,
            scale=self.scale,
            weights=self.weights,
            means=self.means,
            backend=self.backend,
        )

    def fix(self) -> None:
        """The same random matrix for all samples."""
        generator = torch.Generator().manual_seed(_FIXED_SEED)
        self.weights.copy_(torch.randn(self.weights.shape[1:], generator=generator).softmax(dim=-2))
        ops.mean_weights(self.weights, out=self.means)

    def merge(self, tokens: Tensor) -> Tensor:
        """M X."""
        return regional.merge(tokens, self.means, self.regions.tiling, backend=self.backend)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """Aᵀ Y, or M⁺ Y."""
        tiling = self.regions.tiling
        return regional.unmerge(merged, self.weights, tiling, residual, method=self.method, backend=self.backend)

    def sizes(self) -> Tensor:
        """The row sums of A."""
        return self.weights.sum(dim=-1, dtype=torch.float32).flatten()

    def matrix(self) -> Tensor:
        """A as it is stored."""
        return self.weights

    def buffers(self) -> list[Tensor]:
        """A and M."""
        return [self.weights, self.means]


class HardAssignment(Assignment):
    """By an index: every token goes to one destination alone, and a merged token is the mean of its members."""

    def __init__(
        self,
        regions: Regions,
        batch_size: int,
        block_destinations: int,
        *,
        nearness: Nearness,
        backend: str,
        device: torch.device | str,
    ) -> None:
        self.regions = regions
        self.nearness = nearness
        self.batch_size = batch_size
        self.num_destinations = regions.count * block_destinations
        self.num_tokens = regions.count * regions.size
        self.backend = backend
        all_tokens, all_destinations = batch_size * self.num_tokens, batch_size * self.num_destinations
        self.targets = torch.zeros(batch_size, self.num_tokens, dtype=torch.int64, device=device)
        """[B, N]: which merged token each token goes to."""
        self.rows = torch.zeros(all_tokens, dtype=torch.int64, device=device)
        """[B·N]: the same among the merged tokens of all samples."""
        self.members = torch.zeros(all_tokens, dtype=torch.int64, device=device)
        """[B·N]: the tokens, as rows of all samples, in the order of their destinations."""
        self.offsets = torch.zeros(all_destinations + 1, dtype=torch.int64, device=device)
        """[B·D + 1]: where the members of each destination begin."""

    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Find the nearest destination of every token."""
        tiling = self.regions.tiling
        regional.assign_nearest(tokens, destinations, tiling, self.nearness, nearest=self.targets, backend=self.backend)
        self._index()

    def fix(self) -> None:
        """A random destination of its region for every token, the same in all samples; none stays empty."""
        generator = torch.Generator().manual_seed(_FIXED_SEED)
        per_region = self.num_destinations // self.regions.count
        slots = torch.arange(self.regions.size).remainder(per_region)
        shuffled = torch.rand(self.regions.count, self.regions.size, generator=generator).argsort(dim=-1)
        merged = slots[shuffled] + torch.arange(self.regions.count)[:, None] * per_region
        self.targets.copy_(self.regions.join(merged[:, :, None])[:, :, 0])
        self._index()

    def merge(self, tokens: Tensor) -> Tensor:
        """The mean of every destination's members."""
        return regional.merge_members(tokens, self.members, self.offsets, self.num_destinations, backend=self.backend)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """Every token gets a copy of its destination."""
        tokens = merged.reshape(-1, merged.shape[2]).index_select(0, self.rows)
        tokens = tokens.reshape(self.batch_size, self.num_tokens, -1)
        return tokens if residual is None else residual + tokens

    def sizes(self) -> Tensor:
        """The numbers of members."""
        return self.offsets.diff().float()

    def matrix(self) -> Tensor:
        """One 1 in every column."""
        per_region = self.num_destinations // self.regions.count
        slots = self.regions.split(self.targets[:, :, None])[:, :, 0] % per_region  # [B·R, n]
        return functional.one_hot(slots, per_region).mT.float()

    def buffers(self) -> list[Tensor]:
        """The index and its inverse."""
        return [self.targets, self.rows, self.members, self.offsets]

    def _index(self) -> None:
        """Invert the index: from destinations to tokens."""
        sample = torch.arange(self.batch_size, device=self.rows.device)[:, None]
        self.rows.copy_((self.targets + sample * self.num_destinations).reshape(-1))
        ordered, members = self.rows.sort(stable=True)
        self.members.copy_(members)
        bounds = torch.arange(self.offsets.shape[0], device=self.rows.device)
        self.offsets.copy_(torch.searchsorted(ordered, bounds))


class SliceAssignment(Assignment):
    """Keeps the first tokens and drops the others. Nothing is merged."""

    def __init__(self, num_tokens: int, num_destinations: int) -> None:
        self.num_tokens = num_tokens
        self.num_destinations = num_destinations

    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Nothing depends on the tokens."""

    def fix(self) -> None:
        """Nothing is random."""

    def merge(self, tokens: Tensor) -> Tensor:
        """The first D tokens."""
        return tokens.narrow(1, 0, self.num_destinations)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """The merged tokens, then zeros."""
        tokens = functional.pad(merged, (0, 0, 0, self.num_tokens - self.num_destinations))
        return tokens if residual is None else residual + tokens

    def sizes(self) -> Tensor:
        """A token stands for itself alone."""
        raise NotImplementedError("tokens that are cut off have no sizes")

    def matrix(self) -> Tensor:
        """Ones for the tokens that are taken, nothing for the others."""
        return torch.eye(self.num_destinations, self.num_tokens)[None]

    def buffers(self) -> list[Tensor]:
        """None."""
        return []
