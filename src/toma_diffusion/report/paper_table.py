"""The table of a run in the layout of the paper: methods with their ratios, and the best value of each ratio marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toma_diffusion.evaluation.plan import Variant
from toma_diffusion.evaluation.table import FORMATS, HEADINGS

LABELS: Mapping[str, str] = {**HEADINGS, "seconds": "Sec/img ↓", "speedup": "Speed-up ↑"}
DIGITS: Mapping[str, str] = {**FORMATS, "seconds": ".2f"}
"""Headings and formats as in the terminal, with more room for the times."""


@dataclass(frozen=True)
class Cell:
    """One value."""

    text: str
    value: float | None
    best: bool = False
    """Whether it is the best at its ratio."""


@dataclass(frozen=True)
class Line:
    """One variant of a method."""

    ratio: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Method:
    """A method, with one line per ratio."""

    name: str
    settings: str
    """Settings other than the ratio. They distinguish methods of the same name."""
    is_merged: bool
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """Name and settings."""
        return f"{self.name}, {self.settings}" if self.settings else self.name


@dataclass(frozen=True)
class PaperTable:
    """Headings, and the methods in the order of the run."""

    columns: tuple[str, ...]
    """Names of the columns that are not empty."""
    headings: tuple[str, ...]
    methods: tuple[Method, ...]


def paper_table(variants: Sequence[Variant], rows: Sequence[Mapping[str, str]]) -> PaperTable:
    """The table for these rows, one per variant."""
    columns = tuple(name for name in (*list(HEADINGS)[2:], "seconds", "speedup") if any(row[name] for row in rows))
    lines = [Line(row["ratio"], tuple(_cell(name, row[name]) for name in columns)) for row in rows]
    merged = [variant.config is not None for variant in variants]
    for ratio in {line.ratio for line, is_merged in zip(lines, merged, strict=True) if is_merged}:
        rivals = [index for index, line in enumerate(lines) if merged[index] and line.ratio == ratio]
        for index, line in zip(rivals, _mark([lines[index] for index in rivals], columns), strict=True):
            lines[index] = line
    methods: dict[tuple[str, str], Method] = {}
    for variant, line in zip(variants, lines, strict=True):
        key = variant.name, ", ".join(f"{name}={value}" for name, value in variant.asked_for.items())
        known = methods.get(key, Method(*key, variant.config is not None, ()))
        methods[key] = replace(known, lines=(*known.lines, line))
    return PaperTable(columns, tuple(LABELS[name] for name in columns), tuple(methods.values()))


def is_better_low(column: str) -> bool:
    """Whether a lower value is better."""
    return "↓" in LABELS[column]


def _cell(column: str, text: str) -> Cell:
    value = float(text) if text else None
    return Cell("–" if value is None else format(value, DIGITS[column]), value)


def _mark(lines: list[Line], columns: Sequence[str]) -> list[Line]:
    """Mark the best value of each column. If only one line has a value, nothing is marked."""
    best: dict[int, str] = {}
    for position, column in enumerate(columns):
        values = [value for line in lines if (value := line.cells[position].value) is not None]
        if len(values) > 1:
            best[position] = format((min if is_better_low(column) else max)(values), DIGITS[column])
    return [
        replace(line, cells=tuple(replace(cell, best=cell.text == best.get(i)) for i, cell in enumerate(line.cells)))
        for line in lines
    ]
