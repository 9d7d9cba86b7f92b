"""ToMeSD: Token Merging for Fast Stable Diffusion (Bolya & Hoffman 2023, arXiv 2303.17604)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from toma_diffusion.checks import check_flag, check_integer, check_sequence
from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Action, Grid, Plan, gather_rows, num_destinations
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.block import Block
from toma_diffusion.ops.precision import without_autocast
from toma_diffusion.others.base import PerBlockMethod, relative_levels


@dataclass(frozen=True, kw_only=True)
class ToMeSD(Merging):
    """Settings of ToMeSD. Immutable; a wrong value raises `UsageError` at once.

    In every block, one token of each small cell is a destination. The most similar other tokens are averaged into their
    destinations before self-attention, and get a copy of the result after it.

    It was made for UNets. SD3 and PixArt need no changes; all of their blocks are merged. On Flux a merged token gets
    the RoPE row of its destination, a batch shares one matching (by the mean of its similarities, because it shares
    one RoPE table), and single blocks merge their MLP together with their attention, because both run in parallel.

    Example:

    ```python
    >>> from toma_diffusion.others import ToMeSD
    >>> ToMeSD(ratio=0.75).ratio
    0.75
    >>> ToMeSD(ratio=0.8)
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: ratio=0.8 is not allowed: cells of 2×2 tokens leave one in each, ...
    ```
    """

    label: ClassVar[str] = "ToMeSD"

    sites: tuple[str, ...] = ("attn",)
    """Which modules to merge, out of `attn`, `cross_attn` and `ff`. More is faster; the authors recommend `attn`."""

    max_downsample: int = 1
    """Merge down to this downsampling: 1, 2, 4 or 8. Higher merges in more blocks. Counted from the first level that
    has attention, so that 1 is the highest resolution with attention on every model. (The authors count from the
    latent, where SDXL has no attention: there their default does nothing.)"""

    cell: tuple[int, int] = (2, 2)
    """Height and width of the cells that have one destination each. Larger allows a higher ratio."""

    random: bool = True
    """Whether the destination of a cell is random in every block and step, or always the top left token. Odd batches
    always use the top left token, as in the authors' code: the two halves of guidance are then in different calls, and
    different destinations for them cause artifacts."""

    seed: int | None = None
    """Seed of the random destinations, with which each generation starts. None: start from a copy of torch's random
    state. The random state itself is never changed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("sites", self._valid_sites(self.sites))
        cell = check_sequence("cell", self.cell, "height and width")
        if len(cell) != 2:
            raise UsageError(f"cell={self.cell!r} is not allowed: it must be height and width.")
        self._set("cell", tuple(check_integer("cell", side, minimum=1) for side in cell))
        if self.max_downsample not in (1, 2, 4, 8):
            raise UsageError(f"max_downsample={self.max_downsample!r} is not allowed: it must be 1, 2, 4 or 8.")
        check_flag("random", self.random)
        if self.seed is not None:
            self._set("seed", check_integer("seed", self.seed, minimum=0))
        height, width = self.cell
        most = 1 - 1 / (height * width)
        if self.ratio > most:
            raise UsageError(
                f"ratio={self.ratio:g} is not allowed: cells of {height}×{width} tokens leave one in each, so it can "
                f"be {most:.4g} at most."
            )

    @property
    def merged_sites(self) -> tuple[str, ...]:
        return self.sites


class ToMeSDMethod(PerBlockMethod[ToMeSD]):
    """Bipartite soft matching in every block."""

    name = "tomesd"
    config_class = ToMeSD

    def left_whole(self, config: ToMeSD, blocks: list[Block]) -> dict[int, str]:
        reason = f"downsampled by more than max_downsample={config.max_downsample}"
        levels = relative_levels(blocks)
        return {index: reason for index, level in enumerate(levels) if 2**level > config.max_downsample}

    def plans(self, config: ToMeSD, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """All blocks use one random generator, in the order in which they run."""
        return [partial(MatchingPlan, config=config, sampler=CellSampler(config.seed))] * len(blocks)

    def describe(self, config: ToMeSD) -> list[str]:
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
        config: ToMeSD,
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
        return [self.offsets]

    def describe(self) -> str:
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
        self.sampler.forget()

    def update(self, tokens: Tensor, action: Action) -> None:
        """Match the sources among tokens [B, N, d] with the destinations."""
        destinations, sources = self._divide()
        similarity = cosines(tokens.detach(), sources, destinations)  # [B, N − cells, cells]
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
        *_, rows = self._matched()
        tokens = take(merged, rows)
        return tokens if residual is None else residual + tokens

    def gather(self, table: Tensor, dim: int = 0) -> Tensor:
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


@without_autocast
def cosines(tokens: Tensor, sources: Tensor, destinations: Tensor) -> Tensor:
    """Of tokens [B, N, d] at two lists of indices: [B, sources, destinations]. A token of length 0 is like no other."""
    lengths: Tensor = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True)
    unit = tokens / lengths.clamp_min(torch.finfo(tokens.dtype).tiny)
    return unit.index_select(1, sources) @ unit.index_select(1, destinations).mT


def expand(rows: Tensor, tokens: Tensor) -> Tensor:
    """Indices [B, n], or [1, n] for all samples, to [B, n, C]."""
    return rows[:, :, None].expand(tokens.shape[0], -1, tokens.shape[2])


def take(tokens: Tensor, rows: Tensor) -> Tensor:
    """The tokens [B, n, C] at indices [B, n], or [1, n] for all samples."""
    return tokens.gather(1, expand(rows, tokens))
