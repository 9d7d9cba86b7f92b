"""ToMA: Token Merge with Attention (Lu et al. 2025, arXiv 2509.10918)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import ClassVar

from toma_diffusion.engine.hooks import Placement
from toma_diffusion.merge import MergePlan, why_first_frame_whole
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.method import Method, Placed
from toma_diffusion.merge.sites import EnterBlock, LeaveBlock, Site, Stage
from toma_diffusion.merge.state import BlockRecord, MergeState, Slot

MakePlan = Callable[..., MergePlan]


class ToMA(Method[Merge]):
    """Blocks of one kind share a plan. Tokens are merged around modules, around blocks, or around stages."""

    name = "toma"
    config_class = Merge
    plan_class: ClassVar[type[MergePlan]] = MergePlan
    """A subclass may choose other destinations, or assign tokens in another way."""

    def place(self, config: Merge, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
        state.why_first_frame_whole = partial(why_first_frame_whole, config=config)
        around = _around_modules if config.scope == "module" else _around_blocks
        return around(config, partial(self.plan_class, config=config), blocks, reasons, state)

    def describe(self, config: Merge) -> list[str]:
        lines = [f"destinations by facility location, {config.assign} assignment"]
        if config.distance_weight:
            lines.append(f"similarity: cosine − {config.distance_weight:g} · (distance / side of a region)²")
        if config.min_tokens:
            lines.append(f"grids of fewer than {config.min_tokens} tokens left whole")
        if config.share_plan:
            lines.append("stages of one kind share one plan")
        lines.append(f"selected every {_steps(config.select_every)}, reweighed every {_steps(config.reweighed_every)}")
        return lines


def _around_modules(
    config: Merge, make: MakePlan, blocks: list[Block], reasons: dict[int, str], state: MergeState
) -> Placed:
    placements: list[Placement] = []
    records = []
    for index, block in enumerate(blocks):
        specs, reason = block.chosen_sites(config.merged_sites, reasons.get(index))
        for spec in specs:
            site = _site(config, make, state, block, spec)
            placements += [Placement(block.module, name, hook) for name, hook in spec.hooks(site)]
        records.append(block.record(specs, reason))
    return placements, records


def _around_blocks(
    config: Merge, make: MakePlan, blocks: list[Block], reasons: dict[int, str], state: MergeState
) -> Placed:
    placements: list[Placement] = []
    records: list[BlockRecord] = []
    indexed = list(enumerate(blocks))
    # Consecutive blocks of one stage that are all merged stay merged together; in scope `block` each is a stage.
    for (left_whole, _), group in groupby(
        indexed, key=lambda item: (item[0] in reasons, item[1].stage if config.scope == "stage" else item[0])
    ):
        members = list(group)
        if left_whole:
            records += [block.record((), reasons[index]) for index, block in members]
            continue
        stage = Stage()
        state.stages.append(stage)
        for index, block in members:
            site = _site(config, make, state, block)
            first, last = index == members[0][0], index == members[-1][0]
            enter = EnterBlock(site, stage, first, block.normalize, block.per_token, block.writes_in_place)
            leave = LeaveBlock(site, stage, last, block.stream)
            placements += [Placement(block.module, None, enter), Placement(block.module, None, leave)]
            records.append(BlockRecord(block.name, block.kind, block.width, (block.name,), int(first), None))
    return placements, records


def _site(config: Merge, make: MakePlan, state: MergeState, block: Block, spec: SiteSpec | None = None) -> Site:
    """A site of the block. Blocks of a stage share a plan; what stages of one kind share is a setting."""
    of_kind = [slot for slot in state.slots if slot.kind == block.kind]
    sharers = block.kind if config.share_plan else block.stage
    slot = next((slot for slot in of_kind if slot.sharers == sharers), None)
    if slot is None:
        name = f"{block.kind}, {block.stage}" if of_kind else block.kind
        slot = Slot(name, block.kind, make, sharers)
        state.slots.append(slot)
    return Site(state, slot) if spec is None else Site(state, slot, spec.leave_whole)


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
