"""What is merged, and what is not: its part of a handle's summary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.state import BlockRecord, MergeState

NOTHING_MERGED = "nothing was merged: grids are smaller than min_tokens, or regions too small to remove a token from"
BACKEND_NAMES = {"torch": "plain torch", "triton": "Triton kernels", "torch+triton": "Triton kernels and plain torch"}
USUAL_STEPS = 20
SHARES = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters"}


@dataclass(frozen=True)
class KindSummary:
    """All merged blocks of one kind."""

    kind: str
    blocks: int
    sites: int
    grid: str
    tokens_before: int | None
    """None before the first call of the denoiser."""
    tokens_after: int | None
    regions: str


@dataclass(frozen=True)
class MergeSummary:
    """What is merged, and what it saves."""

    config: Merging
    num_blocks: int
    """Of the model."""
    is_used: bool
    """Whether tokens are merged in generations like the last one, or like the usual one if there was none."""
    kinds: tuple[KindSummary, ...]
    left_whole: tuple[tuple[str, str], ...]
    """Blocks that are not merged, and why."""
    notes: tuple[str, ...]
    """What plans could not do."""
    description: tuple[str, ...]
    """What the method does, line by line."""
    backend: str | None
    """What ran the operators: `torch`, `triton` or `torch+triton`. None before the first call of the denoiser."""
    fallbacks: tuple[str, ...]
    """Operators that ran in plain torch although kernels were requested, and why."""
    guidance: str
    """Which samples or passes of the last call shared a plan. Empty before the first call."""
    num_bytes: int
    """Memory held by the plans."""
    multiplications: float | None
    """In all transformer blocks, in a step without merging, by the paper's formula. None for other methods."""
    merged_multiplications: float | None
    """The same in a step with merging, including the cost of the plans, averaged over their schedule."""

    @property
    def headline(self) -> str:
        """In plain words, and in one line."""
        share = SHARES.get(self.config.ratio, f"{self.config.ratio:.0%}")
        if any(kind.tokens_before is None for kind in self.kinds):
            blocks = sum(kind.blocks for kind in self.kinds)
            return f"{share} of the tokens are merged in {blocks} of {self.num_blocks} blocks"
        merged = [kind for kind in self.kinds if kind.tokens_before != kind.tokens_after]
        if not merged:
            return "no tokens are merged: there is nothing to merge on these grids"
        tokens = " and ".join(dict.fromkeys(str(kind.tokens_before) for kind in merged))
        blocks = sum(kind.blocks for kind in merged)
        return f"{share} of {tokens} tokens merged in {blocks} of {self.num_blocks} blocks"

    def lines(self) -> list[str]:
        start, end = self.config.window
        lines = list(self.description)
        lines[-1] += ", in all steps" if (start, end) == (0, 1) else f", from {start:.0%} to {end:.0%} of the steps"
        if self.guidance:
            lines.append(self.guidance)
        if self.backend is not None:
            lines.append(f"operators: {BACKEND_NAMES[self.backend]}; plans take {self.num_bytes / 2**20:.1f} MiB")
        lines += [f"in plain torch: {fallback}" for fallback in self.fallbacks]
        if self.multiplications is not None and self.merged_multiplications is not None:
            saved = 1 - self.merged_multiplications / self.multiplications
            lines.append(
                f"multiplications in the transformer blocks of a merged step, by the paper's formula: "
                f"{self.multiplications:.3g} → {self.merged_multiplications:.3g} ({-saved:+.1%})"
            )
        reasons = Counter(reason for _, reason in self.left_whole)
        lines += [f"left whole, {count} block{'s' if count > 1 else ''}: {why}" for why, count in reasons.items()]
        return lines


def summarize(state: MergeState) -> MergeSummary:
    records = state.records
    merged = [record for record in records if record.left_whole is None]
    kinds = []
    for kind in dict.fromkeys(record.kind for record in merged):
        of_kind = [record for record in merged if record.kind == kind]
        plan = state.plan_of(kind)
        kinds.append(
            KindSummary(
                kind=kind,
                blocks=len(of_kind),
                sites=sum(len(record.merged) for record in of_kind),
                grid=plan.grid.describe() if plan else "–",
                tokens_before=plan.grid.num_tokens if plan else None,
                tokens_after=plan.num_destinations if plan else None,
                regions=plan.describe() if plan else "–",
            )
        )
    whole, merged_cost = _multiplications(records, state)
    ran = [item for plan in state.current.values() for item in plan.backends.items()]
    fallbacks = {f"{operator} ({backend.reason})" for operator, backend in ran if backend.reason}
    return MergeSummary(
        config=state.config,
        num_blocks=len(records),
        is_used=state.merges_in(USUAL_STEPS) if state.is_used is None else state.is_used,
        kinds=tuple(kinds),
        left_whole=tuple((record.name, record.left_whole) for record in records if record.left_whole is not None),
        notes=tuple(sorted(_empty_plans(state))),
        description=state.description,
        backend="+".join(sorted({backend.name for _, backend in ran})) or None,
        fallbacks=tuple(sorted(fallbacks)),
        guidance=state.guidance,
        num_bytes=state.num_bytes,
        multiplications=whole,
        merged_multiplications=merged_cost,
    )


def _empty_plans(state: MergeState) -> set[str]:
    """Notes about plans that remove nothing although tokens were to be removed."""
    if state.merges_nothing:
        return {NOTHING_MERGED}
    empty = {slot.kind: slot.plan for slot in state.slots if slot.plan is not None and slot.plan.is_identity}
    return {
        f"nothing was merged on the {plan.grid.describe()} grid of {kind}: {plan.describe()}"
        for kind, plan in empty.items()
    }


def _multiplications(records: list[BlockRecord], state: MergeState) -> tuple[float | None, float | None]:
    """Multiplications in all blocks in one step, without and with merging. Kinds without a plan yet are not counted."""
    before = after = 0.0
    for record in records:
        plan = state.plan_of(record.kind)
        cost = None if plan is None else plan.multiplications(record.width)
        if cost is None:
            continue
        before += cost.whole
        after += cost.whole if record.left_whole is not None else cost.reduced + cost.merging * record.merges
    for slot in state.slots:  # blocks of one slot share the cost of its plan
        width = next(record.width for record in records if record.kind == slot.kind)
        cost = None if slot.plan is None else slot.plan.multiplications(width)
        after += 0.0 if cost is None else cost.planning
    return (before, after) if before else (None, None)
