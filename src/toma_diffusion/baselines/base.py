"""What the other methods share: their common settings, and how they are put into a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from toma_diffusion.adapters import Block, SiteSpec
from toma_diffusion.config import Config
from toma_diffusion.core import Plan
from toma_diffusion.hooks.handle import Placement
from toma_diffusion.hooks.sites import Hook, Site, UpdatePlan
from toma_diffusion.hooks.state import MergeState, Slot
from toma_diffusion.hooks.summary import BlockRecord


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Config):
    """A method other than ToMA. Every block has a plan of its own, which is made anew in every call."""

    reads_blocks: ClassVar[bool] = True
    """Whether the plan is made from the tokens that come into the block."""

    @abstractmethod
    def plans(self, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """For every block what makes its plan, from a grid, `batch_size`, `dtype`, `device` and `joint`."""

    @abstractmethod
    def left_alone(self, blocks: list[Block]) -> dict[int, str]:
        """By index the blocks that the method does not act in, and why. Raises where it cannot act at all."""

    def hooks(self, spec: SiteSpec, site: Site) -> list[tuple[str, Hook]]:
        """What acts at one place of a block, each with the name of its module inside the block."""
        return spec.hooks(site)

    def place(
        self, blocks: list[Block], reasons: dict[int, str], state: MergeState
    ) -> tuple[list[Placement], list[BlockRecord]]:
        """All hooks of the method, and what is done in every block. `reasons` to leave blocks alone come first."""
        placements: list[Placement] = []
        records = []
        reasons = self.left_alone(blocks) | reasons
        for index, (block, make) in enumerate(zip(blocks, self.plans(blocks), strict=True)):
            specs = block.chosen_sites(self.sites) if index not in reasons else []
            reason = reasons.get(index) or (None if specs else f"has none of the sites {', '.join(self.sites)}")
            if reason is None:
                slot = Slot(block.name, block.kind, make)
                state.slots.append(slot)
                if self.reads_blocks:
                    placements.append(Placement(block.module, None, UpdatePlan(Site(state, slot))))
            for spec in specs:
                hooks = self.hooks(spec, Site(state, slot, spec.leave_alone))
                placements += [Placement(block.module, name, hook) for name, hook in hooks]
            records.append(block.record(specs, reason))
        return placements, records


def relative_levels(blocks: list[Block]) -> list[int]:
    """How often the grid of every block was halved since the first that has any attention.

    SDXL has none at its highest resolution: counted from there, methods that act at the highest level would not act.
    """
    first = min((block.level for block in blocks), default=0)
    return [block.level - first for block in blocks]
