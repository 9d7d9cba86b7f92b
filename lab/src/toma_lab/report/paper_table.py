"""The table of a run in the layout of the paper: methods with their ratios, and the best value of each ratio marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toma_lab.columns import Column
from toma_lab.metrics import METRICS
from toma_lab.rows import Row, number
from toma_lab.table import FORMATS, HEADINGS, MEASURED

LABELS: Mapping[str, str] = {**HEADINGS, "seconds": "Sec/img ↓", "speedup": "Speed-up ↑", "gain": "Gain ↑"}
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
    """One setting of a method."""

    point: str
    """What distinguishes it from the others: the ratio; of fewer steps and caches the steps, threshold or interval."""
    cells: tuple[Cell, ...]
    gain: float | None = None
    """How many times faster it is."""


@dataclass(frozen=True)
class Method:
    """A method, with one line per ratio, number of steps, threshold or interval."""

    name: str
    settings: str
    """Settings other than that. They distinguish methods of the same name."""
    saves_time: bool
    """Whether it is anything but the model as it is."""
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.settings}" if self.settings else self.name


@dataclass(frozen=True)
class PaperTable:
    """Headings, and the methods in the order of the run."""

    columns: tuple[str, ...]
    """Names of the columns that are not empty."""
    headings: tuple[str, ...]
    methods: tuple[Method, ...]
    time_of: str = ""
    """The large model for which gains were computed. Empty: they were measured."""
    thing: str = "image"
    """What was generated: `image` or `clip`."""

    def value(self, line: Line, column: str) -> float | None:
        """None if the table has no such column."""
        return line.cells[self.columns.index(column)].value if column in self.columns else None


def paper_table(compared: Sequence[Column], rows: Sequence[Row]) -> PaperTable:
    """The table for these rows, one for each of what was compared."""
    computed = {row.get("gain_source", "") for row in rows} - {"", MEASURED}
    names = (*METRICS, "seconds", "speedup", *(["gain"] if computed else []))
    columns = tuple(name for name in names if any(row.get(name) for row in rows))
    lines = [
        Line(each.point, tuple(_cell(name, row) for name in columns), number(row, "gain" if computed else "speedup"))
        for each, row in zip(compared, rows, strict=True)
    ]
    merged = [index for index, each in enumerate(compared) if each.own and each.own.merge and not each.shortcuts]
    for point in {lines[index].point for index in merged}:
        rivals = [index for index in merged if lines[index].point == point]
        for index, line in zip(rivals, _mark([lines[index] for index in rivals], columns), strict=True):
            lines[index] = line
    methods: dict[tuple[str, str], Method] = {}
    for each, line in zip(compared, lines, strict=True):
        known = methods.get(each.line, Method(*each.line, each.saves_time, ()))
        methods[each.line] = replace(known, lines=(*known.lines, line))
    thing = "clip" if any(row.get("frames") for row in rows) else "image"
    headings = tuple(LABELS[name].replace("img", "clip" if thing == "clip" else "img") for name in columns)
    return PaperTable(columns, headings, tuple(methods.values()), "".join(sorted(computed)), thing)


def is_better_low(column: str) -> bool:
    return "↓" in LABELS[column]


def _cell(column: str, row: Row) -> Cell:
    value = number(row, column)
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
