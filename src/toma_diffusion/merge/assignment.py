"""How tokens are assigned to destinations: by a matrix or by an index.

Every assignment has fixed buffers that are updated in place. `update` reads tokens [B, N, d] and destinations, `merge`
turns [B, N, C] into [B, D, C], and `unmerge` the reverse, added to a residual if one is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from toma_diffusion.merge.regions import Regions
from toma_diffusion.ops import regional
from toma_diffusion.ops.backend import Backend, backend_of
from toma_diffusion.ops.regional import Nearness


class Assignment(ABC):
    """Assigns all tokens of a grid to their destinations."""

    is_hard: ClassVar[bool]
    """Whether every token goes to one destination alone, by an index."""
    num_weights = 0
    """Elements of the matrix, if there is one."""

    def __init__(self, regions: Regions, nearness: Nearness, backend: str) -> None:
        self.regions = regions
        self.nearness = nearness
        self.backend = backend

    @abstractmethod
    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Assign [B, N, d] to destinations [B·R / parts, k], which are indices inside each region."""

    @abstractmethod
    def merge(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, D, C]."""

    @abstractmethod
    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """[B, D, C] -> [B, N, C], added to the residual if there is one."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """A written out, [B·R, k, n]: how much of every token goes to each destination of its region."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The tensors that it holds."""

    def backends(self, gradients: Collection[str]) -> dict[str, Backend]:
        """What runs each of its operators, and why. Autograd follows those in `gradients`."""
        return {
            operator: backend_of(
                operator,
                self.backend,
                self.regions.tiling,
                num_weights=self.num_weights,
                hard=self.is_hard,
                gradients=operator in gradients,
            )
            for operator in ("weights", "merging", "unmerging")
        }


class SoftAssignment(Assignment):
    """By a matrix: A, columns summing to 1, and M = A / row sums; a block of them per region."""

    is_hard = False

    def __init__(
        self,
        regions: Regions,
        batch_size: int,
        block_destinations: int,
        *,
        scale: float,
        nearness: Nearness,
        backend: str,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(regions, nearness, backend)
        self.scale = scale
        shape = (batch_size * regions.count, block_destinations, regions.size)
        self.weights = torch.zeros(shape, dtype=dtype, device=device)
        """A, [B·R, k, n]."""
        self.means = torch.zeros(shape, dtype=dtype, device=device)
        """M, [B·R, k, n]."""
        self.num_weights = self.weights.numel()

    def update(self, tokens: Tensor, destinations: Tensor) -> None:
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

    def merge(self, tokens: Tensor) -> Tensor:
        return regional.merge(tokens, self.means, self.regions.tiling, backend=self.backend)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        return regional.unmerge(merged, self.weights, self.regions.tiling, residual, backend=self.backend)

    def matrix(self) -> Tensor:
        return self.weights

    def buffers(self) -> list[Tensor]:
        return [self.weights, self.means]


class HardAssignment(Assignment):
    """By an index: every token goes to one destination alone, and a merged token is the mean of its members."""

    is_hard = True

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
        super().__init__(regions, nearness, backend)
        self.batch_size = batch_size
        self.num_destinations = regions.count * block_destinations
        self.num_tokens = regions.count * regions.size
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
        tiling = self.regions.tiling
        regional.assign_nearest(tokens, destinations, tiling, self.nearness, nearest=self.targets, backend=self.backend)
        self.index()

    def index(self) -> None:
        """Invert `targets`: from destinations to tokens."""
        sample = torch.arange(self.batch_size, device=self.rows.device)[:, None]
        self.rows.copy_((self.targets + sample * self.num_destinations).reshape(-1))
        ordered, members = self.rows.sort(stable=True)
        self.members.copy_(members)
        bounds = torch.arange(self.offsets.shape[0], device=self.rows.device)
        self.offsets.copy_(torch.searchsorted(ordered, bounds))

    def merge(self, tokens: Tensor) -> Tensor:
        return regional.merge_members(
            tokens, self.members, self.offsets, self.num_destinations, self.regions.tiling, backend=self.backend
        )

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        tokens = merged.reshape(-1, merged.shape[2]).index_select(0, self.rows)
        tokens = tokens.reshape(self.batch_size, self.num_tokens, -1)
        return tokens if residual is None else residual + tokens

    def matrix(self) -> Tensor:
        """One 1 in every column."""
        per_region = self.num_destinations // self.regions.count
        slots = self.regions.split(self.targets[:, :, None])[:, :, 0] % per_region  # [B·R, n]
        return functional.one_hot(slots, per_region).mT.float()

    def buffers(self) -> list[Tensor]:
        return [self.targets, self.rows, self.members, self.offsets]
