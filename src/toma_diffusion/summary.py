"""The summary of a handle: what is done in plain words, then the details."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toma_diffusion.engine.install import RootHook
from toma_diffusion.merge.state import MergeState
from toma_diffusion.merge.summary import MergeSummary, summarize
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.summary import SkipSummary

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


@dataclass(frozen=True)
class Summary:
    """What is done. `print(handle.summary())` shows it."""

    enabled: bool
    skip: SkipSummary | None
    """None: no step is skipped."""
    merge: MergeSummary | None
    """None: no tokens are merged."""
    notes: tuple[str, ...]
    """What calls had to do differently from the settings."""
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

        parts: list[RenderableType] = [] if self.enabled else ["switched off: the model runs as it is"]
        parts += [] if self.skip is None else self.skip.lines
        if self.merge is not None and self.merge.is_used:
            parts += [self.merge.headline, _table(self.merge), *self.merge.lines()]
        elif self.merge is not None:
            parts.append("no tokens are merged in generations of so many steps")
        parts += [f"note: {note}" for note in self.notes]
        for number, other in enumerate(self.others, start=2):
            parts += [f"\nDenoiser {number} of {len(self.others) + 1}:", other]
        return Group(*parts)


def _table(merge: MergeSummary) -> Table:
    """A row for every kind of block."""
    from rich.table import Table

    table = Table(title=f"{merge.config.label}, ratio {merge.config.ratio:g}")
    for heading in ("kind", "blocks", f"merged, scope {merge.config.scope}", "grid", "tokens", "regions"):
        table.add_column(heading)
    for kind in merge.kinds:
        tokens = "not called yet"
        if kind.tokens_before is not None:
            tokens = f"{kind.tokens_before} → {kind.tokens_after}"
        table.add_row(kind.kind, str(kind.blocks), str(kind.sites), kind.grid, tokens, kind.regions)
    return table


def summary_of(root: RootHook) -> Summary:
    """What was installed in one denoiser, and what its last call did."""
    merge = summarize(root.inside) if isinstance(root.inside, MergeState) else None
    notes = {*root.session.notes, *(merge.notes if merge is not None and merge.is_used else ())}
    return Summary(
        enabled=root.session.enabled,
        skip=root.outermost.summary() if isinstance(root.outermost, Skipper) else None,
        merge=merge,
        notes=tuple(sorted(notes)),
    )
