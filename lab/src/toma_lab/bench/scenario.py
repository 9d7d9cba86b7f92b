"""What is timed: cells (a method with its settings) and groups (cells that share one baseline)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toma_diffusion.errors import UsageError
from toma_lab.bench.bounds import FLOOR, LOWER_BOUND, bounds_of
from toma_lab.experiments.cells import Cell, MethodSpec, cells_of
from toma_lab.experiments.parsing import Resolution
from toma_lab.experiments.shortcuts import Shortcut

MODES = ("eager", "compiled", "graph")
COMPILES = ("none", "block", "whole", "graphs")
BASELINE = "baseline"


@dataclass(frozen=True)
class Comparison:
    """A method, and the two cells that bound its time from below."""

    cell: Cell
    lower_bound: Cell | None = None
    """The same with fixed random projections: nothing is selected or weighed."""
    floor: Cell | None = None
    """The same with tokens sliced away: nothing is merged either."""

    @property
    def references(self) -> list[Cell]:
        """The bounds that it has."""
        return [cell for cell in (self.lower_bound, self.floor) if cell is not None]


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
        if self.mode == "compiled":
            how = {
                "block": "compiled block by block",
                "whole": "the whole compiled",
                "graphs": "the whole compiled and captured as CUDA graphs",
            }[self.compile]
        cached = "" if self.cache is None else f", first-block cache {self.cache:g}"
        size = f"{self.resolution}, {self.frames} frames" if self.frames else f"{self.resolution}"
        return f"{self.model}, {size}, batch {self.batch}, {self.dtype}, {self.steps} steps, {how}{cached}"


def compare(
    model: Any,
    methods: Iterable[MethodSpec],
    ratios: Iterable[float],
    scopes: Iterable[str],
    *,
    bounds: Iterable[str],
    shortcuts: Iterable[Shortcut] = (),
) -> list[Comparison]:
    """All cells but the baseline, each with the bounds that are wanted."""
    wanted = set(bounds)
    comparisons = []
    for shortcut in shortcuts:
        shortcut.check(model)
        comparisons.append(Comparison(Cell(shortcut.name, shortcut=shortcut)))
    for cell in cells_of(model, methods, ratios, scopes):
        lower_bound, floor = bounds_of(cell.config) if cell.config is not None else (None, None)
        comparisons.append(
            Comparison(cell, lower_bound if LOWER_BOUND in wanted else None, floor if FLOOR in wanted else None)
        )
    return comparisons


@dataclass(frozen=True)
class Scenario:
    """All settings of one run of the benchmark, except the model."""

    methods: tuple[MethodSpec, ...]
    ratios: tuple[float, ...]
    scopes: tuple[str, ...]
    resolutions: tuple[Resolution, ...]
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    compile: str
    steps: int
    repeats: int
    bounds: tuple[str, ...]
    """Which of `lower-bound` and `floor` are measured with every method."""
    pipeline: bool
    cache: float | None
    shortcuts: tuple[Shortcut, ...] = ()
    """Other ways to save time, to compare with."""
    frames: int | None = None
    """Of a clip."""

    def __post_init__(self) -> None:
        for shortcut in self.shortcuts:
            shortcut.steps_of(self.steps)  # raises if it is not fewer
            if shortcut.needs_pipeline:
                left = shortcut.steps_of(self.steps)
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
        for mode in self.modes:
            _one_of("mode", mode, MODES)
        _one_of("compile", self.compile, COMPILES)
        for bound in self.bounds:
            _one_of("bound", bound, (LOWER_BOUND, FLOOR))
        if "compiled" in self.modes and self.compile == "none":
            raise UsageError("mode 'compiled' needs --compile block, whole or graphs, not 'none'.")
        for name, value in (("steps", self.steps), ("repeats", self.repeats), *(("batch", b) for b in self.batches)):
            if value < 1:
                raise UsageError(f"{name}={value} is not allowed: it must be 1 or more.")
        if self.cache is not None and "graph" in self.modes:
            raise UsageError(
                f"--cache {self.cache:g} decides in every step what to run, which mode 'graph' cannot follow."
            )
        if self.cache is not None and self.compile not in ("none", "block") and "compiled" in self.modes:
            raise UsageError(
                f"--cache {self.cache:g} decides between blocks: use --compile block, not {self.compile!r}."
            )
        if "graph" in self.modes and self.compile == "graphs":
            raise UsageError("mode 'graph' captures by itself: use --compile block or whole with it, not 'graphs'.")

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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} {value!r} is not known: use one of {', '.join(allowed)}.")
