"""ToMeSD: Token Merging for Fast Stable Diffusion (Bolya & Hoffman 2023, arXiv 2303.17604)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.merge import Action, Grid, Plan, gather_rows, num_destinations
from toma_diffusion.merge.block import Block
from toma_diffusion.others.base import PerBlockMethod, relative_levels
from toma_diffusion.others.tomesd_settings import ToMeSDConfig


class ToMeSD(PerBlockMethod[ToMeSDConfig]):
    """Bipartite soft matching in every block."""

    name = "tomesd"
    config_class = ToMeSDConfig

    def left_alone(self, config: ToMeSDConfig, blocks: list[Block]) -> dict[int, str]:
        """Blocks of a lower resolution."""
        reason = f"downsampled by more than max_downsample={config.max_downsample}"
        levels = relative_levels(blocks)
        return {index: reason for index, level in enumerate(levels) if 2**level > config.max_downsample}

    def plans(self, config: ToMeSDConfig, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """All blocks use one random generator, in the order in which they run."""
        return [partial(MatchingPlan, config=config, sampler=CellSampler(config.seed))] * len(blocks)

    def describe(self, config: ToMeSDConfig) -> list[str]:
        """How tokens are matched."""
        return describe_matching(config)


def describe_matching(config: ToMeSDConfig) -> list[str]:
    """How tokens are matched, line by line, for the summary."""
    height, width = config.cell
    where = "at random" if config.random else "the top left"
    return [f"one destination in each cell of {height}×{width}, {where}", "matched anew in every block"]


class CellSampler:
    """Random numbers from a separate generator, which starts again with every generation."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._generator: torch.Generator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CellSampler:
        return CellSampler(self.seed)

    def forget(self) -> None:
        """Start again with the next numbers."""
        self._generator = None

    def below(self, limit: int, count: int, device: torch.device) -> Tensor:
        """[count] whole numbers from 0 to below `limit`."""
        where = device if device.type == "cuda" else torch.device("cpu")
        if self._generator is None or self._generator.device != where:
            self._generator = self._start(where)
        return torch.randint(limit, (count,), generator=self._generator, device=where).to(device)

    def _start(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        if self.seed is not None:
            return generator.manual_seed(self.seed)
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return generator.set_state(state)


class MatchingPlan(Plan):
    """Which tokens of a block merge into which: bipartite soft matching between sources and destinations.

    The merged tokens are the sources that stay, most similar first, then the destinations in row-major order.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        config: ToMeSDConfig,
        sampler: CellSampler,
        batch_size: int,
        parts: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        joint: bool = False,
    ) -> None:
        self.grid = grid
        self.config = config
        self.sampler = sampler
        self.device = torch.device(device)
        self.joint = joint
        self.random = config.random and batch_size % 2 == 0
        height, width = config.cell
        rows = torch.arange(grid.height // height, device=device) * height
        columns = torch.arange(grid.width // width, device=device) * width
        frames = torch.arange(grid.frames, device=device) * grid.height
        self.corners = ((frames[:, None, None] + rows[:, None]) * grid.width + columns).flatten()
        """[cells]: the top left token of every cell. Rows and columns that fill no cell hold only sources."""
        self.num_cells = len(self.corners)
        self.offsets = torch.zeros(self.num_cells, dtype=torch.int64, device=device)
        """[cells]: which token of its cell is the destination."""
        removable = grid.num_tokens - self.num_cells if self.num_cells else 0
        self.num_removed = min(removable, grid.num_tokens - num_destinations(grid.num_tokens, config.ratio))
        """r."""
        self._matching: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def num_destinations(self) -> int:
        """N − r: tokens of a sample after merging, including the sources that are kept."""
        return self.grid.num_tokens - self.num_removed

    @property
    def buffers(self) -> list[Tensor]:
        """The random destinations."""
        return [self.offsets]

    def describe(self) -> str:
        """The cells."""
        height, width = self.config.cell
        if self.num_cells == 0:
            return f"smaller than a cell of {height}×{width}"
        fixed = ", top left because of an odd batch" if self.config.random and not self.random else ""
        return f"{self.num_cells} cells of {height}×{width}{fixed}"

    def begin_call(self) -> None:
        """Choose random destinations. While a CUDA graph is captured, those of the last call are kept."""
        if self.random and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            height, width = self.config.cell
            self.offsets.copy_(self.sampler.below(height * width, self.num_cells, self.device))

    def wants(self, action: Action) -> bool:
        """Always: nothing is kept from block to block."""
        return not self.is_identity

    def forget(self) -> None:
        """Start the random numbers again."""
        self.sampler.forget()

    def update(self, tokens: Tensor, action: Action) -> None:
        """Match the sources among tokens [B, N, d] with the destinations."""
        destinations, sources = self._divide()
        unit = unit_vectors(tokens.detach())
        similarity = unit.index_select(1, sources) @ unit.index_select(1, destinations).mT  # [B, N − cells, cells]
        if self.joint:
            similarity = similarity.mean(dim=0, keepdim=True)
        likeness, nearest = similarity.max(dim=-1)
        ranking = likeness.argsort(dim=-1, descending=True, stable=True)
        gone, stay = ranking[:, : self.num_removed], ranking[:, self.num_removed :]
        origins = torch.cat([sources[stay], destinations.expand(len(stay), -1)], dim=1)  # [B, D]
        members = sources[gone]  # [B, r]
        targets = nearest.gather(1, gone) + stay.shape[1]  # [B, r]
        order = torch.arange(origins.shape[1], device=tokens.device).expand_as(origins)
        rows = torch.zeros(len(stay), self.grid.num_tokens, dtype=torch.int64, device=tokens.device)
        rows = rows.scatter(1, origins, order).scatter(1, members, targets)  # [B, N]
        self._matching = origins, members, targets, rows

    def merge(self, tokens: Tensor) -> Tensor:
        """Every destination becomes the mean of itself and the sources that merge into it."""
        origins, members, targets, _ = self._matched()
        targets = expand(targets, tokens)
        return take(tokens, origins).scatter_reduce(1, targets, take(tokens, members), reduce="mean")

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """Every source gets a copy of its destination."""
        *_, rows = self._matched()
        tokens = take(merged, rows)
        return tokens if residual is None else residual + tokens

    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
        """The rows of the sources that are kept and of the destinations."""
        origins, *_ = self._matched()
        return gather_rows(table, dim, origins[0] if self.joint else origins)

    def _divide(self) -> tuple[Tensor, Tensor]:
        """Destinations and sources [cells] and [N − cells], both in row-major order."""
        _, width = self.config.cell
        chosen = self.corners + self.offsets // width * self.grid.width + self.offsets % width
        is_source = torch.ones(self.grid.num_tokens, dtype=torch.int8, device=chosen.device)
        order = is_source.index_fill(0, chosen, 0).argsort(stable=True)
        return order[: self.num_cells], order[self.num_cells :]

    def _matched(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self._matching is None:
            raise RuntimeError("these tokens are not matched yet: call update(tokens, Action.SELECT) first.")
        return self._matching


def unit_vectors(tokens: Tensor) -> Tensor:
    """Tokens of length 1; one of length 0 stays as it is."""
    lengths: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    return tokens / lengths.clamp_min(torch.finfo(tokens.dtype).tiny)


def expand(rows: Tensor, tokens: Tensor) -> Tensor:
    """Indices [B, n], or [1, n] for all samples, to [B, n, C]."""
    return rows[:, :, None].expand(tokens.shape[0], -1, tokens.shape[2])


def take(tokens: Tensor, rows: Tensor) -> Tensor:
    """The tokens [B, n, C] at indices [B, n], or [1, n] for all samples."""
    return tokens.gather(1, expand(rows, tokens))
