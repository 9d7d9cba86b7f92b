"""ToMA: Token Merge with Attention (Lu et al. 2025, arXiv 2509.10918)."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from toma_diffusion.engine.install import Placement
from toma_diffusion.engine.summary import BlockRecord
from toma_diffusion.errors import UsageError
from toma_diffusion.families import Block, Site, SiteSpec
from toma_diffusion.merge import MergePlan, why_first_frame_whole
from toma_diffusion.merge.base import SITES
from toma_diffusion.merge.config import ToMAConfig
from toma_diffusion.merge.sites import EnterBlock, LeaveBlock, Run
from toma_diffusion.merge.state import MergeState, Slot
from toma_diffusion.others.base import Method, Placed

_SHARED = {"plan": "one plan", "destinations": "destinations", "nothing": "nothing"}


class ToMA(Method[ToMAConfig]):
    """Blocks of one kind share a plan. Tokens are merged around modules, around blocks, or around runs of blocks."""

    name = "toma"
    config_class = ToMAConfig

    def place(self, config: ToMAConfig, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
        """The hooks depend on the scope."""
        if config.scope != "module" and config.sites != SITES:
            raise UsageError(
                f"sites={config.sites} counts only in scope 'module'; scope={config.scope!r} merges whole blocks. "
                "Add scope='module', or leave sites out."
            )
        if config.size_aware_attention and (without := [block.name for block in blocks if block.key_bias is None]):
            raise UsageError(
                f"size_aware_attention=True is not possible here: the attention of {without[0]} takes no bias. "
                "Leave it out for this model."
            )
        state.why_first_frame_whole = partial(why_first_frame_whole, config=config)
        around = _around_modules if config.scope == "module" else _around_blocks
        return around(config, blocks, reasons, state)

    def describe(self, config: ToMAConfig) -> list[str]:
        """How destinations are selected, and when."""
        lines = [f"destinations by {config.selection}, {config.assign} assignment, unmerged by {config.unmerge}"]
        if config.distance_weight:
            lines.append(f"similarity: cosine − {config.distance_weight:g} · (distance / side of a region)²")
        if config.size_aware_attention:
            lines.append("self-attention knows the sizes of merged tokens")
        if config.norm_preserving:
            lines.append("merged tokens keep the mean length of their tokens")
        if config.min_tokens:
            lines.append(f"grids of fewer than {config.min_tokens} tokens left whole")
        lines.append(f"runs of blocks of one kind share {_SHARED[config.share]}")
        lines.append(f"selected every {_steps(config.select_every)}, reweighed every {_steps(config.reweigh_every)}")
        return lines


def _around_modules(config: ToMAConfig, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
    placements: list[Placement] = []
    records = []
    for index, block in enumerate(blocks):
        specs = block.chosen_sites(config.sites) if index not in reasons else []
        reason = reasons.get(index) or (None if specs else f"has none of the sites {', '.join(config.sites)}")
        for spec in specs:
            site = _site(config, state, block, spec)
            placements += [Placement(block.module, name, hook) for name, hook in spec.hooks(site)]
        records.append(block.record(specs, reason))
    return placements, records


def _around_blocks(config: ToMAConfig, blocks: list[Block], reasons: dict[int, str], state: MergeState) -> Placed:
    placements: list[Placement] = []
    records: list[BlockRecord] = []
    indexed = list(enumerate(blocks))
    # Consecutive blocks of one run that are all merged stay merged together; in `block` scope each is its own run.
    for (left_alone, _), group in groupby(
        indexed, key=lambda item: (item[0] in reasons, item[1].run if config.scope == "stage" else item[0])
    ):
        members = list(group)
        if left_alone:
            records += [block.record((), reasons[index]) for index, block in members]
            continue
        run = Run()
        state.runs.append(run)
        for index, block in members:
            site = _site(config, state, block)
            first, last = index == members[0][0], index == members[-1][0]
            enter = EnterBlock(
                site, run, first, block.normalize, block.per_token, block.key_bias, block.writes_in_place
            )
            leave = LeaveBlock(site, run, last, block.stream)
            placements += [Placement(block.module, None, enter), Placement(block.module, None, leave)]
            records.append(BlockRecord(block.name, block.kind, block.width, (block.name,), int(first), None))
    return placements, records


def _site(config: ToMAConfig, state: MergeState, block: Block, spec: SiteSpec | None = None) -> Site:
    """A site of the block. Blocks of a run share a plan; what runs of one kind share is a setting."""
    of_kind = [slot for slot in state.slots if slot.kind == block.kind]
    sharers = block.kind if config.share == "plan" else block.run
    slot = next((slot for slot in of_kind if slot.sharers == sharers), None)
    if slot is None:
        name = f"{block.kind}, {block.run}" if of_kind else block.kind
        first = of_kind[0] if of_kind and config.share == "destinations" else None
        slot = Slot(name, block.kind, partial(MergePlan, config=config), sharers, first)
        state.slots.append(slot)
    return Site(state, slot) if spec is None else Site(state, slot, spec.leave_alone)


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"
