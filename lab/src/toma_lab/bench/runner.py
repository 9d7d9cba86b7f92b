"""Measures groups of cells, and writes a row as soon as a cell is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from toma_lab.bench import caching
from toma_lab.bench.measure import Measured, attention_of, measure
from toma_lab.bench.models import Denoiser
from toma_lab.bench.pipelines import EndToEnd
from toma_lab.bench.records import Records, Row
from toma_lab.bench.scenario import BASELINE, Comparison, Group, Scenario
from toma_lab.bench.turns import Turns
from toma_lab.experiments.cells import Cell
from toma_lab.experiments.facts import Facts

if TYPE_CHECKING:
    from rich.progress import Progress

BASELINE_CELL = Cell(BASELINE)
TOLERATED_DRIFT = 0.1
"""A baseline that ends more than this share off its beginning was not measured on a quiet machine."""


@dataclass(frozen=True)
class Task:
    """What is still to be measured in a group."""

    group: Group
    comparisons: tuple[Comparison, ...]
    bounds: tuple[Cell, ...]
    """Bounds of any method that have no row yet."""
    has_baseline: bool

    @property
    def cells(self) -> list[Cell]:
        """In the order of measuring: the baseline, always measured again, then every method after its bounds."""
        wanted = [cell for comparison in self.comparisons for cell in (*comparison.references, comparison.cell)]
        cells = dict.fromkeys([*wanted, *self.bounds])
        return [BASELINE_CELL, *cells] if cells or not self.has_baseline else []


@dataclass(eq=False)
class Runner:
    """Measures what the records do not hold yet."""

    scenario: Scenario
    denoiser: Denoiser
    comparisons: list[Comparison]
    records: Records
    facts: Facts
    make_end_to_end: Callable[[], EndToEnd] | None
    """Builds the rest of the pipeline, if whole pipelines are timed too."""
    progress: Progress
    turns: Turns
    failures: int = 0

    def __post_init__(self) -> None:
        self.groups = self.scenario.groups(self.denoiser.name, str(self.denoiser.dtype).removeprefix("torch."))
        self._end_to_end: EndToEnd | None = None

    def run(self) -> None:
        """Measure all cells. One that fails is reported, and the others go on."""
        tasks = [self.task(group) for group in self.groups]
        bar = self.progress.add_task("starting", total=sum(len(task.cells) + (len(task.cells) > 1) for task in tasks))
        for task in tasks:
            if not task.cells:
                self._say(f"Nothing to do, {self.records.path.name} has all of: {task.group}")
                continue
            self.progress.update(bar, description=f"building {self.denoiser.name}")
            self.turns.prepare()
            self.denoiser.materialize()
            with self._cache(task.group):
                self._run(task, bar)

    def task(self, group: Group) -> Task:
        """What is missing of a group. Rows of other commits, versions or machines do not count."""
        rows = self.records.matching(group.key | asdict(self.facts))
        if self._times_pipeline(group):
            rows = [row for row in rows if row["pipeline_s"]]

        def is_done(cell: Cell) -> bool:
            return any(cell.key.items() <= row.items() for row in rows)

        missing = tuple(comparison for comparison in self.comparisons if not is_done(comparison.cell))
        bounds = dict.fromkeys(cell for comparison in self.comparisons for cell in comparison.references)
        return Task(group, missing, tuple(cell for cell in bounds if not is_done(cell)), is_done(BASELINE_CELL))

    def _run(self, task: Task, bar: Any) -> None:
        comparisons = {comparison.cell: comparison for comparison in task.comparisons}
        measured: dict[Cell, Measured] = {}
        first_row = len(self.records.rows)
        for cell in task.cells:
            found = self._try(task.group, cell, bar)
            self.progress.advance(bar)
            if found is not None:
                measured[cell] = found
                comparison, attention = comparisons.get(cell, Comparison(cell)), attention_of(self.denoiser.model)
                self.records.append(row_of(task.group, comparison, measured, self.facts, attention))
            elif cell is BASELINE_CELL:
                self._say(f"Left out, for want of a baseline: {task.group}")
                self.failures += len(task.cells) - 1
                self.progress.advance(bar, len(task.cells))
                return
        if len(measured) > 1:
            self._check_drift(task.group, measured[BASELINE_CELL], first_row, bar)
            self.progress.advance(bar)

    def _check_drift(self, group: Group, baseline: Measured, first_row: int, bar: Any) -> None:
        """Time the baseline once more. On a machine shared with other work it once came out 40 times too slow, with
        hardly any spread, and made every method look 48 times faster. Its steps are all alike, so that those of a
        second are enough."""
        enough = max(1, round(1000 / baseline.timing.median))
        shorter = group if group.cache is not None else replace(group, steps=min(group.steps, enough))
        again = self._try(shorter, BASELINE_CELL, bar, with_pipeline=False)
        if again is None:
            return
        drift = round(again.timing.median / baseline.timing.median - 1, 4)
        self.records.note_drift(first_row, drift)
        if abs(drift) > TOLERATED_DRIFT:
            self._say(
                f"Warning: the baseline took {baseline.timing.median:.4g} ms at the beginning and "
                f"{again.timing.median:.4g} ms at the end ({group}): something else is using this machine. "
                "Do not trust these speed-ups; measure again with --fresh."
            )

    def _try(self, group: Group, cell: Cell, bar: Any, *, with_pipeline: bool = True) -> Measured | None:
        name = _describe(cell)
        found, failure = None, ""

        def stage(text: str) -> None:
            self.progress.update(bar, description=f"{text} {name}")

        try:
            parts = self._parts() if with_pipeline and self._times_pipeline(group) else None
            repeats, turns = self.scenario.repeats, self.turns
            found = measure(self.denoiser, group, cell, repeats=repeats, end_to_end=parts, turns=turns, stage=stage)
        except Exception as error:  # a cell that does not run, or not in this memory, must not stop the others
            failure = f"{type(error).__name__}: {_first_line(error)}"
        gc.collect()  # outside of the handler, where the traceback would still hold the failed cell's tensors
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if found is None:
            self.failures += 1
            self._say(f"Failed: {name} ({group}): {failure}")
            return None
        for warning in found.warnings:
            self._say(f"Warning: {name} ({group}): {warning}.")
        return found

    @contextmanager
    def _cache(self, group: Group) -> Iterator[None]:
        if group.cache is None:
            yield
            return
        model: Any = self.denoiser.model
        caching.enable(model, group.cache)
        try:
            yield
        finally:
            model.disable_cache()

    def _times_pipeline(self, group: Group) -> bool:
        """A pipeline calls its denoiser itself, so it cannot be timed with replayed graphs."""
        return self.make_end_to_end is not None and group.mode != "graph"

    def _parts(self) -> EndToEnd | None:
        if self._end_to_end is None and self.make_end_to_end is not None:
            self._end_to_end = self.make_end_to_end()
        return self._end_to_end

    def _say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


def row_of(
    group: Group, comparison: Comparison, measured: Mapping[Cell, Measured], facts: Facts, attention: str
) -> Row:
    """A measured cell beside the baseline and the bounds that were measured with it."""
    own, baseline = measured[comparison.cell], measured[BASELINE_CELL]
    step_ms, baseline_ms = round(own.timing.median, 4), round(baseline.timing.median, 4)
    lower_bound_ms, floor_ms = (
        round(measured[cell].timing.median, 4) if cell is not None and cell in measured else None
        for cell in (comparison.lower_bound, comparison.floor)
    )
    texts: dict[str, Any] = group.key | comparison.cell.key | asdict(facts)
    return Row(
        **texts,
        step_ms=step_ms,
        step_ms_p20=round(own.timing.p20, 4),
        step_ms_p80=round(own.timing.p80, 4),
        baseline_ms=baseline_ms,
        speedup=round(baseline_ms / step_ms, 4),
        lower_bound_ms=lower_bound_ms,
        over_lower_bound=round(step_ms / lower_bound_ms - 1, 4) if lower_bound_ms else None,
        floor_ms=floor_ms,
        over_floor=round(step_ms / floor_ms - 1, 4) if floor_ms else None,
        peak_mib=_rounded(own.peak_mib, 1),
        baseline_peak_mib=_rounded(baseline.peak_mib, 1),
        pipeline_s=_rounded(own.pipeline_s, 4),
        baseline_pipeline_s=_rounded(baseline.pipeline_s, 4),
        cache_hits=_rounded(own.cache_hits, 4),
        backend=own.backend,
        attention=attention,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _describe(cell: Cell) -> str:
    return cell.method if cell.config is None else f"{cell.method}, {cell.config.scope}, ratio {cell.config.ratio:g}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
