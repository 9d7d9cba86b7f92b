"""Methods in which every block has a plan of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

from toma_diffusion.engine.hooks import Hook, Placement
from toma_diffusion.merge import Plan
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.method import ConfigT, Method, Placed
from toma_diffusion.merge.sites import Site, UpdatePlan
from toma_diffusion.merge.state import MergeState, Slot


class PerBlockMethod(Method[ConfigT]):
    """A method in which every block has a plan of its own, computed in every call."""

    reads_blocks: ClassVar[bool] = True
    """Whether the plan is computed from the tokens that enter the block."""

    @abstractmethod
    def plans(self, config: ConfigT, blocks: list[Block]) -> list[Callable[..., Plan]]:
        """For every block a function that makes its plan, from a grid, `batch_size`, `dtype`, `device` and `joint`."""

    @abstractmethod
    def left_whole(self, config: ConfigT, blocks: list[Block]) -> dict[int, str]:
        """By index, the blocks that the method does not merge, and why. Raises if it cannot be applied at all."""

    def hooks(self, spec: SiteSpec, site: Site) -> list[tuple[str, Hook]]:
        return spec.hooks(site)

    def place(self, config: ConfigT, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
        placements: list[Placement] = []
        records = []
        reasons = self.left_whole(config, blocks) | reasons
        for index, (block, make) in enumerate(zip(blocks, self.plans(config, blocks), strict=True)):
            specs, reason = block.chosen_sites(config.merged_sites, reasons.get(index))
            if reason is None:
                slot = Slot(block.name, block.kind, make)
                state.slots.append(slot)
                if self.reads_blocks:
                    placements.append(Placement(block.module, None, UpdatePlan(Site(state, slot))))
            for spec in specs:
                hooks = self.hooks(spec, Site(state, slot, spec.leave_whole))
                placements += [Placement(block.module, name, hook) for name, hook in hooks]
            records.append(block.record(specs, reason))
        return placements, records


def relative_levels(blocks: list[Block]) -> list[int]:
    """How often the grid of every block was halved since the first that has any attention.

    SDXL has none at its highest resolution. Counted from there, methods that act at the highest level would do nothing.
    """
    first = min((block.level for block in blocks), default=0)
    return [block.level - first for block in blocks]
