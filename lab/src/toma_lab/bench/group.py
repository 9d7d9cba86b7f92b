"""What is timed: groups of columns (methods with their settings) that share one baseline, and bounds of their time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toma_diffusion.checks import check_integer, check_one_of
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.config import Merge
from toma_lab.bounds import Projection, Slice
from toma_lab.columns import UNCHANGED, Column, ColumnSpec, columns_of
from toma_lab.columns.ours import Ours
from toma_lab.parsing import Resolution

MODES = ("eager", "compiled", "graph")
COMPILES = ("none", "block", "whole", "graphs")
BASELINE = UNCHANGED[0]
LOWER_BOUND, FLOOR = "lower-bound", "floor"
BOUNDS = (LOWER_BOUND, FLOOR)
"""The same with fixed random projections, where nothing is selected or weighed; and with tokens dropped, where nothing
is merged either."""
Bounds = Mapping[str, Column]
"""By their names, of one column."""
HOW = {
    "block": "compiled block by block",
    "whole": "the whole compiled",
    "graphs": "the whole compiled and captured as CUDA graphs",
}


@dataclass(frozen=True)
class Group:
    """Everything that a method shares with the baseline it is compared with."""

    model: str
    resolution: Resolution
    batch: int
    mode: str
    compile: str
    steps: int
    dtype: str
    cache: float | None = None
    """Threshold of the first-block cache, if it is on."""
    frames: int | None = None
    """Of a clip."""

    def __post_init__(self) -> None:
        check_one_of("mode", self.mode, MODES)
        check_one_of("compile", self.compile, COMPILES)
        check_integer("steps", self.steps, minimum=1)
        check_integer("batch", self.batch, minimum=1)
        if self.mode == "eager":
            object.__setattr__(self, "compile", "none")
        if self.mode == "compiled" and self.compile == "none":
            raise UsageError("mode 'compiled' needs --compile block, whole or graphs, not 'none'.")
        if self.mode == "graph" and self.compile == "graphs":
            raise UsageError("mode 'graph' captures by itself: use --compile block or whole with it, not 'graphs'.")
        if self.cache is not None and self.mode == "graph":
            raise UsageError(
                f"--cache {self.cache:g} decides in every step what to run, which mode 'graph' cannot follow."
            )
        if self.cache is not None and self.compile not in ("none", "block"):
            raise UsageError(
                f"--cache {self.cache:g} decides between blocks: use --compile block, not {self.compile!r}."
            )

    @property
    def key(self) -> dict[str, str]:
        optional = {"cache": "" if self.cache is None else f"{self.cache:g}", "frames": str(self.frames or "")}
        return {name: str(value) for name, value in vars(self).items()} | optional

    def __str__(self) -> str:
        how = self.mode if self.compile == "none" else f"{self.mode}, compiled by {self.compile}"
        how = HOW[self.compile] if self.mode == "compiled" else how
        cached = "" if self.cache is None else f", first-block cache {self.cache:g}"
        size = f"{self.resolution}, {self.frames} frames" if self.frames else f"{self.resolution}"
        return f"{self.model}, {size}, batch {self.batch}, {self.dtype}, {self.steps} steps, {how}{cached}"

    def check(self, column: Column) -> None:
        """Raise `UsageError` if a method cannot be timed so."""
        left = column.steps_of(self.steps)  # raises if it is not fewer
        for shortcut in column.shortcuts:
            if shortcut.needs_pipeline:
                same = "benchmarks/bench_deepcache.py times its steps" if shortcut.is_cache else f"time steps:{left}"
                raise UsageError(
                    f"method {shortcut.text!r} needs a pipeline, which there is none of here: compare it with "
                    f"`toma eval`; {same}."
                )
            if self.mode == "graph" and shortcut.is_cache:
                raise UsageError(
                    f"method {shortcut.text!r} decides in every step what to run, which mode 'graph' cannot follow: "
                    "use --modes eager,compiled."
                )


def with_bounds(
    model: Any, specs: Iterable[ColumnSpec], ratios: Sequence[float], names: Sequence[str]
) -> dict[Column, Bounds]:
    """All columns but the baseline, each with the bounds of these names."""
    for name in names:
        check_one_of("bound", name, BOUNDS)
    columns = columns_of(model, specs, ratios)
    return {column: {name: each for name, each in bounds_of(column).items() if name in names} for column in columns}


def bounds_of(column: Column) -> dict[str, Column]:
    """The bounds of a column's time; what merges by another method than ToMA, or in some generations only, has none.

    What makes no difference to them has its default value, so that methods share them.
    """
    own = column.own
    if own is None or not isinstance(own.merge, Merge):
        return {}
    merge = own.merge
    settings, usual = merge.to_dict(), Merge().to_dict()
    shared = {name: settings[name] for name in ("ratio", "scope", "sites", "window", "min_tokens", "skip_blocks")}
    fixed = {name: usual[name] for name in ("select_every", "reweigh_every")} | {
        "selection": "none",
        "unmerge": "transpose",
    }
    bounds = {LOWER_BOUND: Projection.from_dict(settings | fixed), FLOOR: Slice.from_dict(shared)}
    return {name: Column(name, Ours(merge=bound, skip=own.skip, learned=own.learned)) for name, bound in bounds.items()}
