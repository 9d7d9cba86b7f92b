"""The summary of a handle: what is merged, and what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toma_diffusion.merge.base import Config
from toma_diffusion.merge.state import MergeState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toma_diffusion.engine.install import Outermost

NOTHING_MERGED = "nothing was merged: grids are smaller than min_tokens, or regions too small to remove a token from"
BACKEND_NAMES = {"torch": "plain torch", "triton": "Triton kernels", "torch+triton": "Triton kernels and plain torch"}


@dataclass(frozen=True)
class BlockRecord:
    """One transformer block, as it was installed."""

    name: str
    kind: str
    width: int
    merged: tuple[str, ...]
    """The modules merged, or the block itself."""
    merges: int
    """How often tokens are merged and unmerged in it. In a run of blocks it is counted in the first."""
    left_alone: str | None
    """Why nothing in it is merged, if so."""


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
class Summary:
    """What is merged. `print(handle.summary())` shows it as a table."""

    config: Config
    enabled: bool
    kinds: tuple[KindSummary, ...]
    left_alone: tuple[tuple[str, str], ...]
    """Blocks that are not merged, and why."""
    notes: tuple[str, ...]
    """What calls had to do differently from the configuration."""
    description: tuple[str, ...]
    """What the method does, line by line."""
    backend: str | None
    """What ran the operators: `torch`, `triton` or `torch+triton`. None before the first call of the denoiser."""
    fallbacks: tuple[str, ...]
    """Operators that ran in plain torch although kernels were requested, and why."""
    guidance: str
    """Which samples or passes of the last call shared a plan. Empty before the first call."""
    skip: tuple[str, ...]
    """Which steps are skipped, and how they are predicted, line by line. Empty if none is."""
    steps: tuple[int, int]
    """How many steps of the last generation were computed, and how many predicted."""
    computed: tuple[int, ...] | None
    """Which steps of the last generation were to be computed, if others were skipped; None: all."""
    plan_bytes: int
    """Memory held by the plans."""
    memory_bytes: int
    """Memory held by the outputs that skipped steps are predicted from."""
    multiplications: float | None
    """In all transformer blocks, in a step without merging, by the paper's formula. None for other methods."""
    merged_multiplications: float | None
    """The same in a step with merging, including the cost of the plans, averaged over their schedule."""
    others: tuple[Summary, ...] = ()
    """Of the other denoisers, if a pipeline has several."""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table

        config = self.config
        off = "" if self.enabled else " (switched off)"
        if not self.kinds:
            return Group(f"no tokens are merged{off}", *self._last_lines())
        table = Table(title=f"{config.label}, ratio {config.ratio:g}{off}")
        for heading in ("kind", "blocks", f"merged, scope {config.scope}", "grid", "tokens", "regions"):
            table.add_column(heading)
        for kind in self.kinds:
            tokens = "not merged" if any(self.steps) else "not called yet"
            if kind.tokens_before is not None:
                tokens = f"{kind.tokens_before} → {kind.tokens_after}"
            table.add_row(kind.kind, str(kind.blocks), str(kind.sites), kind.grid, tokens, kind.regions)
        start, end = config.window
        lines = list(self.description)
        lines[-1] += ", in all steps" if (start, end) == (0, 1) else f", from {start:.0%} to {end:.0%} of the steps"
        if config.max_steps is not None:
            lines.append(f"no tokens are merged in generations of more than {config.max_steps} steps")
        if self.guidance:
            lines.append(self.guidance)
        if self.backend is not None:
            lines.append(f"operators: {BACKEND_NAMES[self.backend]}; plans take {self.plan_bytes / 2**20:.1f} MiB")
        lines += [f"in plain torch: {fallback}" for fallback in self.fallbacks]
        if self.multiplications is not None and self.merged_multiplications is not None:
            saved = 1 - self.merged_multiplications / self.multiplications
            lines.append(
                f"multiplications in the transformer blocks of a merged step, by the paper's formula: "
                f"{self.multiplications:.3g} → {self.merged_multiplications:.3g} ({-saved:+.1%})"
            )
        return Group(table, *lines, *self._last_lines())

    def _last_lines(self) -> list[RenderableType]:
        denoisers: list[RenderableType] = []
        for number, other in enumerate(self.others, start=2):
            denoisers += [f"\nDenoiser {number} of {len(self.others) + 1}:", other]
        return [*self.skip, *self._other_lines(), *denoisers]

    def _other_lines(self) -> list[str]:
        reasons = Counter(reason for _, reason in self.left_alone)
        lines = [f"left alone, {count} block{'s' if count > 1 else ''}: {why}" for why, count in reasons.items()]
        return lines + [f"note: {note}" for note in self.notes]


def summarize(state: MergeState, records: Iterable[BlockRecord], outermost: Outermost | None) -> Summary:
    """Build the summary from the installed hooks and the last call."""
    records = list(records)
    merged = [record for record in records if record.left_alone is None]
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
    plans = list(state.current.values())
    whole, merged_cost = _multiplications(records, state)
    ran = [item for plan in plans for item in plan.backends.items()]
    fallbacks = {f"{operator} ({backend.reason})" for operator, backend in ran if backend.reason}
    return Summary(
        config=state.config,
        enabled=state.enabled,
        kinds=tuple(kinds),
        left_alone=tuple((record.name, record.left_alone) for record in records if record.left_alone is not None),
        notes=tuple(sorted(state.notes | _empty_plans(state))),
        description=state.description,
        backend="+".join(sorted({backend.name for _, backend in ran})) or None,
        fallbacks=tuple(sorted(fallbacks)),
        guidance=state.guidance,
        skip=() if outermost is None else outermost.lines(),
        steps=(0, 0) if outermost is None else outermost.counts,
        computed=state.computed,
        plan_bytes=state.num_bytes,
        memory_bytes=0 if outermost is None else outermost.num_bytes,
        multiplications=whole,
        merged_multiplications=merged_cost,
    )


def _empty_plans(state: MergeState) -> set[str]:
    """Notes about plans that remove nothing although tokens were to be removed."""
    if not state.config.ratio:
        return set()
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
        after += cost.whole if record.left_alone is not None else cost.reduced + cost.merging * record.merges
    for slot in state.slots:  # blocks of one slot share the cost of its plan
        width = next(record.width for record in records if record.kind == slot.kind)
        cost = None if slot.plan is None else slot.plan.multiplications(width)
        after += 0.0 if cost is None else cost.planning
    return (before, after) if before else (None, None)
