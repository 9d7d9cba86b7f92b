"""Measures groups of columns, and writes a row as soon as a column is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from toma_diffusion.engine.compile import hold_compiler
from toma_lab.bench.group import BASELINE, BOUNDS, Bounds, Group
from toma_lab.bench.measure import Measured, attention_of, measure
from toma_lab.bench.pipelines import EndToEnd
from toma_lab.bench.turns import Turns
from toma_lab.bench.zoo import Denoiser
from toma_lab.columns import Column, parse_shortcut
from toma_lab.facts import Facts
from toma_lab.rows import Row, Rows

if TYPE_CHECKING:
    from rich.progress import Progress

TOLERATED_DRIFT = 0.1
"""A baseline that ends more than this share off its beginning was not measured on a quiet machine."""


@dataclass(eq=False)
class Runner:
    """Measures what the rows do not hold yet."""

    groups: list[Group]
    denoiser: Denoiser
    columns: Mapping[Column, Bounds]
    """All but the baseline."""
    repeats: int
    rows: Rows
    facts: Facts
    make_end_to_end: Callable[[], EndToEnd] | None
    """Builds the rest of the pipeline, if whole pipelines are timed too."""
    progress: Progress
    turns: Turns
    failures: int = 0
    _end_to_end: EndToEnd | None = None

    def run(self) -> None:
        """Measure all columns. One that fails is reported, and the others go on."""
        missing = {group: self.missing(group) for group in self.groups}
        if any(group.compile != "none" for group in missing):
            hold_compiler(self, lambda: None)  # or every column would have compiled code forgotten, and begin anew
        bar = self.progress.add_task(
            "starting", total=sum(len(columns) + (len(columns) > 1) for columns in missing.values())
        )
        for group, columns in missing.items():
            if not columns:
                self._say(f"Nothing to do, {self.rows.path.name} has all of: {group}")
                continue
            self.progress.update(bar, description=f"building {self.denoiser.name}")
            self.turns.prepare()
            self.denoiser.materialize()
            with self._cache(group):
                self._run(group, columns, bar)

    def missing(self, group: Group) -> list[Column]:
        """The columns to measure, in order: the baseline, always measured again, then every method after its bounds.

        Rows of other commits, versions or machines do not count.
        """

        def is_missing(column: Column) -> bool:
            rows = self.rows.matching(group.key | asdict(self.facts) | column.key)
            return not any(row.get("pipeline_s") or not self._times_pipeline(group) for row in rows)

        columns: dict[Column, None] = {}
        for column, bounds in self.columns.items():
            is_wanted = is_missing(column)  # then its bounds too: they are compared within a run
            columns |= dict.fromkeys(bound for bound in bounds.values() if is_wanted or is_missing(bound))
            columns |= {column: None} if is_wanted else {}
        return [BASELINE, *columns] if columns or is_missing(BASELINE) else []

    def _run(self, group: Group, columns: list[Column], bar: Any) -> None:
        measured: dict[Column, Measured] = {}
        first_row = len(self.rows)
        for column in columns:
            found = self._try(group, column, bar)
            self.progress.advance(bar)
            if found is not None:
                measured[column] = found
                bounds, attention = self.columns.get(column, {}), attention_of(self.denoiser.model)
                self.rows.add(row_of(group, column, bounds, measured, self.facts, attention))
            elif column is BASELINE:
                self._say(f"Left out, for want of a baseline: {group}")
                self.failures += len(columns) - 1
                self.progress.advance(bar, len(columns))
                return
        if len(measured) > 1:
            self._check_drift(group, measured[BASELINE], first_row, bar)
            self.progress.advance(bar)

    def _check_drift(self, group: Group, baseline: Measured, first_row: int, bar: Any) -> None:
        """Time the baseline once more, and write into the rows how much it changed.

        On a machine shared with other work it once came out 40 times too slow, with hardly any spread, and made every
        method look 48 times faster. Its steps are all alike, so that those of a second are enough.
        """
        enough = max(1, round(1000 / baseline.timing.median))
        shorter = group if group.cache is not None else replace(group, steps=min(group.steps, enough))
        again = self._try(shorter, BASELINE, bar, with_pipeline=False)
        if again is None:
            return
        drift = again.timing.median / baseline.timing.median - 1
        for row in list(self.rows)[first_row:]:
            row["baseline_drift"] = str(round(drift, 4))
        self.rows.write()
        if abs(drift) > TOLERATED_DRIFT:
            self._say(
                f"Warning: the baseline took {baseline.timing.median:.4g} ms at the beginning and "
                f"{again.timing.median:.4g} ms at the end ({group}): something else is using this machine. "
                "Do not trust these speed-ups; measure again with --fresh."
            )

    def _try(self, group: Group, column: Column, bar: Any, *, with_pipeline: bool = True) -> Measured | None:
        name = _describe(column)
        found, failure = None, ""

        def stage(text: str) -> None:
            self.progress.update(bar, description=f"{text} {name}")

        try:
            parts = self._parts() if with_pipeline and self._times_pipeline(group) else None
            repeats, turns = self.repeats, self.turns
            found = measure(self.denoiser, group, column, repeats=repeats, end_to_end=parts, turns=turns, stage=stage)
        except Exception as error:  # a column that does not run, or not in this memory, must not stop the others
            failure = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        gc.collect()  # outside of the handler, where the traceback would still hold the failed column's tensors
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
        """The first-block cache, on before `apply_toma`, which then does not merge blocks that the cache compares."""
        if group.cache is None:
            yield
            return
        cache = parse_shortcut(f"first-block-cache:{group.cache}")
        with cache.applied(self.denoiser.model, group.steps):
            yield

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
    group: Group,
    column: Column,
    bounds: Bounds,
    measured: Mapping[Column, Measured],
    facts: Facts,
    attention: str,
) -> Row:
    """A measured column beside the baseline and the bounds that were measured with it. Times are medians."""
    own, baseline = measured[column], measured[BASELINE]
    step_ms, baseline_ms = round(own.timing.median, 4), round(baseline.timing.median, 4)
    row: Row = group.key | column.key | asdict(facts)
    row |= {"step_ms": step_ms, "step_ms_p20": round(own.timing.p20, 4), "step_ms_p80": round(own.timing.p80, 4)}
    row |= {"baseline_ms": baseline_ms, "speedup": round(baseline_ms / step_ms, 4)}
    for name in BOUNDS:
        if name in bounds and bounds[name] in measured:
            cell, bound_ms = name.replace("-", "_"), round(measured[bounds[name]].timing.median, 4)
            row |= {f"{cell}_ms": bound_ms, f"over_{cell}": round(step_ms / bound_ms - 1, 4)}
    return row | {
        "peak_mib": _rounded(own.peak_mib, 1),
        "baseline_peak_mib": _rounded(baseline.peak_mib, 1),
        "pipeline_s": _rounded(own.pipeline_s, 4),
        "baseline_pipeline_s": _rounded(baseline.pipeline_s, 4),
        "cache_hits": _rounded(own.cache_hits, 4),
        "backend": own.backend,
        "attention": attention,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _describe(column: Column) -> str:
    key = column.key
    return f"{column.name}, {key['scope']}, ratio {key['ratio']}" if key["ratio"] else column.title


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
