"""What merging needs to know of a transformer block. Families describe their blocks by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.sites import PerToken, Site, never
from toma_diffusion.merge.state import BlockRecord


@dataclass(frozen=True)
class SiteSpec:
    """One place where tokens can be merged in `module` scope."""

    name: str
    """Name of the module inside its block."""
    roles: frozenset[str]
    """Which of `attn`, `cross_attn` and `ff` it is. Merged if one of them is in the setting `sites`."""
    hooks: Callable[[Site], list[tuple[str, Hook]]]
    """The hooks that merge before and unmerge after, each with the name of its module inside the block."""
    leave_whole: Callable[[Given], bool] = never
    """Whether a call of the module with these arguments must not be merged."""


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    name: str
    module: nn.Module
    kind: str
    """Blocks of one kind have the same grid and the same width, and share a plan."""
    width: int
    sites: tuple[SiteSpec, ...]
    """In the order in which they run."""
    normalize: Callable[[nn.Module, Given], Tensor]
    """Computes the tokens that the first layer of the block gets. Destinations are selected among them."""
    stage: str = ""
    """Consecutive blocks of one stage may stay merged together. Default: its name without the last number."""
    per_token: tuple[PerToken, ...] = ()
    """The arguments of the block, besides the tokens, that have a row for every token: positions, masks."""
    stream: int | None = None
    """Which of the block's outputs is the image stream; None if it returns one tensor."""
    takes_other_keys: bool = False
    """Whether self-attention takes other tokens for its keys, in the argument in which cross-attention gets text."""
    writes_in_place: bool = False
    """Whether the block, or the model after it, writes into the tensors that it passes on."""
    level: int = 0
    """How often the grid was halved before this block. 0 if the model has one resolution."""
    feed_forward_chunk_dim: int | None = None
    """The dimension along which the feed-forward layer is called on chunks, if it is."""

    def __post_init__(self) -> None:
        if not self.stage:
            object.__setattr__(self, "stage", self.name.rpartition(".")[0])

    def chosen_sites(self, roles: tuple[str, ...], left_whole: str | None) -> tuple[list[SiteSpec], str | None]:
        """The places to merge that have one of these roles, or why there are none."""
        if left_whole is not None:
            return [], left_whole
        specs = [spec for spec in self.sites if spec.roles & set(roles)]
        if self.feed_forward_chunk_dim is not None and any("ff" in spec.roles for spec in specs):
            raise UsageError(
                f"{self.name} feeds its feed-forward layer in pieces (set_chunk_feed_forward, "
                f"dim={self.feed_forward_chunk_dim}), which cannot be merged: switch that off, or leave 'ff' out of "
                "the sites."
            )
        return specs, None if specs else f"has none of the sites {', '.join(roles)}"

    def record(self, specs: Iterable[SiteSpec], left_whole: str | None) -> BlockRecord:
        """For the summary: what is merged in this block, or why nothing is."""
        names = tuple(f"{self.name}.{spec.name}" for spec in specs) if left_whole is None else ()
        return BlockRecord(self.name, self.kind, self.width, names, len(names), left_whole)
