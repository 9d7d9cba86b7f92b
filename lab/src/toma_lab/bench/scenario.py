"""What is timed: columns (a method with its settings), and groups of them that share one baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.checks import check_integer, check_one_of
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.config import ToMAConfig
from toma_diffusion.others import method_of
from toma_lab.columns import UNCHANGED, Column, ColumnSpec, columns_of
from toma_lab.parsing import Resolution

MODES = ("eager", "compiled", "graph")
COMPILES = ("none", "block", "whole", "graphs")
LOWER_BOUND, FLOOR = "lower-bound", "floor"
BASELINE = UNCHANGED[0]
HOW = {
    "block": "compiled block by block",
    "whole": "the whole compiled",
    "graphs": "the whole compiled and captured as CUDA graphs",
}


@dataclass(frozen=True)
class Comparison:
    """A method, and two others that bound its time from below."""

    column: Column
    lower_bound: Column | None = None
    """The same with fixed random projections: nothing is selected or weighed."""
    floor: Column | None = None
    """The same with tokens sliced away: nothing is merged either."""

    @property
    def references(self) -> list[Column]:
        """The bounds that it has."""
        return [column for column in (self.lower_bound, self.floor) if column is not None]


@dataclass(frozen=True)
class Group:
    """Everything that a method shares with the baseline it is compared with."""

    model: str
    resolution: Resolution
    batch: int
    mode: str
    compile: str
    steps: int
    cache: float | None
    """Threshold of the first-block cache, if it is on."""
    dtype: str
    frames: int | None = None
    """Of a clip."""

    @property
    def key(self) -> dict[str, str]:
        """The columns that distinguish it from other groups."""
        optional = {"cache": "" if self.cache is None else f"{self.cache:g}", "frames": str(self.frames or "")}
        return {name: str(value) for name, value in vars(self).items()} | optional

    def __str__(self) -> str:
        how = self.mode if self.compile == "none" else f"{self.mode}, compiled by {self.compile}"
        how = HOW[self.compile] if self.mode == "compiled" else how
        cached = "" if self.cache is None else f", first-block cache {self.cache:g}"
        size = f"{self.resolution}, {self.frames} frames" if self.frames else f"{self.resolution}"
        return f"{self.model}, {size}, batch {self.batch}, {self.dtype}, {self.steps} steps, {how}{cached}"


@dataclass(frozen=True)
class Scenario:
    """How everything is timed."""

    resolutions: tuple[Resolution, ...]
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    compile: str
    steps: int
    repeats: int
    cache: float | None = None
    frames: int | None = None
    """Of a clip."""

    def __post_init__(self) -> None:
        for mode in self.modes:
            check_one_of("mode", mode, MODES)
        check_one_of("compile", self.compile, COMPILES)
        for name, value in (("steps", self.steps), ("repeats", self.repeats), *(("batch", b) for b in self.batches)):
            check_integer(name, value, minimum=1)
        if "compiled" in self.modes and self.compile == "none":
            raise UsageError("mode 'compiled' needs --compile block, whole or graphs, not 'none'.")
        if "graph" in self.modes and self.compile == "graphs":
            raise UsageError("mode 'graph' captures by itself: use --compile block or whole with it, not 'graphs'.")
        if self.cache is not None and "graph" in self.modes:
            raise UsageError(
                f"--cache {self.cache:g} decides in every step what to run, which mode 'graph' cannot follow."
            )
        if self.cache is not None and self.compile not in ("none", "block") and "compiled" in self.modes:
            raise UsageError(
                f"--cache {self.cache:g} decides between blocks: use --compile block, not {self.compile!r}."
            )

    def groups(self, model: str, dtype: str) -> list[Group]:
        """One for each resolution, batch and mode."""
        return [
            Group(
                model,
                resolution,
                batch,
                mode,
                "none" if mode == "eager" else self.compile,
                self.steps,
                self.cache,
                dtype,
                self.frames,
            )
            for resolution in self.resolutions
            for batch in self.batches
            for mode in self.modes
        ]

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
            if "graph" in self.modes and shortcut.is_cache:
                raise UsageError(
                    f"method {shortcut.text!r} decides in every step what to run, which mode 'graph' cannot follow: "
                    "use --modes eager,compiled."
                )


def comparisons_of(
    model: Any, specs: Iterable[ColumnSpec], ratios: Sequence[float], scopes: Sequence[str], bounds: Iterable[str]
) -> list[Comparison]:
    """All columns but the baseline, each with the bounds that are wanted."""
    wanted = set(bounds)
    for bound in wanted:
        check_one_of("bound", bound, (LOWER_BOUND, FLOOR))
    comparisons = []
    for column in columns_of(model, specs, ratios, scopes):
        lower_bound, floor = bounds_of(column)
        comparisons.append(
            Comparison(column, lower_bound if LOWER_BOUND in wanted else None, floor if FLOOR in wanted else None)
        )
    return comparisons


def bounds_of(column: Column) -> tuple[Column | None, Column | None]:
    """The lower bound and the floor of a method's time; methods other than ToMA have none.

    What makes no difference to them has its default value, so that methods share them.
    """
    config = column.config
    if config is None or method_of(config).name != "toma":
        return None, None
    settings, usual = config.to_dict(), ToMAConfig()
    shared = ("ratio", "scope", "sites", "window", "min_tokens", "skip_blocks")
    floor = ToMAConfig(selection="slice", **{name: settings[name] for name in shared})
    often = {"select_every": usual.select_every, "reweigh_every": usual.reweigh_every}
    lower_bound = replace(ToMAConfig.from_dict(settings), selection="none", **often)
    return Column(LOWER_BOUND, lower_bound), Column(FLOOR, floor)
