"""What a handle tells about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toma_diffusion.config import Config
from toma_diffusion.core import MergePlan, Plan
from toma_diffusion.hooks.state import MergeState

if TYPE_CHECKING:
    from rich.console import RenderableType


NOTHING_MERGED = "nothing was merged: grids are smaller than min_tokens, or regions too small to remove a token from"


@dataclass(frozen=True)
class BlockRecord:
    """One transformer block, as it was installed."""

    name: str
    kind: str
    width: int
    merged: tuple[str, ...]
    """The modules merged, or the block itself."""
    merges: int
    """How often tokens are merged and unmerged in it; in a run of blocks only in the first."""
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
    """None as long as the denoiser has not been called."""
    tokens_after: int | None
    regions: str


@dataclass(frozen=True)
class Summary:
    """Printable: `print(handle.summary())`, or give it to a rich console."""

    config: Config
    enabled: bool
    kinds: tuple[KindSummary, ...]
    left_alone: tuple[tuple[str, str], ...]
    """Blocks that are not merged, and why."""
    notes: tuple[str, ...]
    """What calls had to do otherwise than configured."""
    backend: str | None
    """Which operators ran, `torch` or `triton`; None as long as the denoiser has not been called."""
    multiplications: float | None
    """Of all transformer blocks in one step, by the paper's formula, without merging. Known for ToMA alone."""
    merged_multiplications: float | None
    """With merging, the plans' own cost included, spread over their schedule."""

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
        table = Table(title=f"{config.label}, ratio {config.ratio:g}{'' if self.enabled else ' (switched off)'}")
        for heading in ("kind", "blocks", f"merged, scope {config.scope}", "grid", "tokens", "regions"):
            table.add_column(heading)
        for kind in self.kinds:
            tokens = "not called yet" if kind.tokens_before is None else f"{kind.tokens_before} → {kind.tokens_after}"
            table.add_row(kind.kind, str(kind.blocks), str(kind.sites), kind.grid, tokens, kind.regions)
        start, end = config.window
        lines = config.describe()
        lines[-1] += ", in all steps" if (start, end) == (0, 1) else f", from {start:.0%} to {end:.0%} of the steps"
        if self.backend is not None:
            lines.append(f"operators: {'fused Triton kernels' if self.backend == 'triton' else 'plain torch'}")
        if self.multiplications is not None and self.merged_multiplications is not None:
            saved = 1 - self.merged_multiplications / self.multiplications
            lines.append(
                f"multiplications in the transformer blocks of a step, by the paper's formula: "
                f"{self.multiplications:.3g} → {self.merged_multiplications:.3g} ({-saved:+.1%})"
            )
        reasons = Counter(reason for _, reason in self.left_alone)
        lines += [f"left alone, {count} block{'s' if count > 1 else ''}: {reason}" for reason, count in reasons.items()]
        lines += [f"note: {note}" for note in self.notes]
        return Group(table, *lines)


def summarize(state: MergeState, records: Iterable[BlockRecord]) -> Summary:
    """Build the summary from what was installed and what was last seen."""
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
                grid=f"{plan.grid.height}×{plan.grid.width}" if plan else "–",
                tokens_before=plan.grid.num_tokens if plan else None,
                tokens_after=plan.num_destinations if plan else None,
                regions=plan.describe() if plan else "–",
            )
        )
    costs = [_multiplications(record, state.plan_of(record.kind)) for record in records]
    known = [cost for cost in costs if cost is not None]
    overhead = sum(_plan_multiplications(slot.plan, _width(records, slot.kind)) for slot in state.slots)
    notes = state.notes | ({NOTHING_MERGED} if state.config.ratio and state.merges_nothing else set())
    return Summary(
        config=state.config,
        enabled=state.enabled,
        kinds=tuple(kinds),
        left_alone=tuple((record.name, record.left_alone) for record in records if record.left_alone is not None),
        notes=tuple(sorted(notes)),
        backend=next((plan.backend for plan in state.current.values()), None),
        multiplications=sum(whole for whole, _ in known) if known else None,
        merged_multiplications=sum(less for _, less in known) + overhead if known else None,
    )


def _multiplications(record: BlockRecord, plan: Plan | None) -> tuple[float, float] | None:
    """Of a block without and with merging: 7d²N + 2dN², and the same of D with the merging and unmerging."""
    if not isinstance(plan, MergePlan):
        return None
    width, tokens, destinations = record.width, plan.grid.num_tokens, plan.num_destinations
    whole = 7 * width**2 * tokens + 2 * width * tokens**2
    if record.left_alone is not None or plan.is_identity:
        return whole, whole
    merging = 2 * width * tokens * destinations / plan.assign_regions.count * record.merges
    return whole, 7 * width**2 * destinations + 2 * width * destinations**2 + merging


def _plan_multiplications(plan: Plan | None, width: int) -> float:
    """Of choosing destinations and weights, per step."""
    if not isinstance(plan, MergePlan) or plan.is_identity or plan.config.selection in ("none", "slice"):
        return 0.0
    config, tokens = plan.config, plan.grid.num_tokens
    selection = tokens**2 * width / plan.regions.count if config.selection == "facility-location" else 0
    weights = tokens * plan.num_destinations * width / plan.assign_regions.count + tokens * width
    return selection / config.select_every + weights / min(config.reweigh_every, config.select_every)


def _width(records: list[BlockRecord], kind: str) -> int:
    return next(record.width for record in records if record.kind == kind)
