"""Plots speed against quality, one curve per method (the paper's Figure 5), as SVG for light and dark pages."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toma_lab.report.front import Curves, Point, describe, draw, draw_curves, style_of
from toma_lab.report.paper_table import LABELS, Method, PaperTable, is_better_low

INK = "#010203"
"""Placeholder for the page's own text colour."""
_SIGNS = "●■▲◆▼✚✖⬢"
"""The markers as characters, for the legend."""


@dataclass(frozen=True)
class Key:
    """One entry of the legend, which all plots of a page share."""

    name: str
    sign: str
    color: str


@dataclass(frozen=True)
class Plot:
    """One plot."""

    column: str
    svg: str
    description: str
    """The plot in words, for screen readers."""


def gain_against_distance(table: PaperTable) -> Plot | None:
    """Gain in time against LPIPS with the front drawn, if there are both."""
    curves = {
        method.title: [
            Point(line.gain, value, line.point)
            for line in method.lines
            if line.gain is not None and (value := table.value(line, "lpips"))  # equal images have no logarithm
        ]
        for method in table.methods
        if method.saves_time
    }
    if not any(curves.values()):
        return None
    return Plot("front", drawn("front", (7.0, 4.4), lambda axis: draw(axis, curves, INK)), describe(curves))


def speed_against_quality(table: PaperTable) -> list[Plot]:
    """One plot for every metric that has values."""
    metrics = [column for column in table.columns if column not in ("seconds", "speedup", "gain")]
    return [plot for column in metrics if (plot := _plot(table, column)) is not None]


def legend(table: PaperTable) -> list[Key]:
    """The sign and colour of each method."""
    names = [method.title for method in table.methods if method.saves_time]
    return [Key(name, _SIGNS[index % len(_SIGNS)], style_of(index)["color"]) for index, name in enumerate(names)]


def _plot(table: PaperTable, column: str) -> Plot | None:
    curves = {method.title: _points(table, method, column) for method in table.methods if method.saves_time}
    if not any(curves.values()):
        return None
    label = f"{LABELS[column].rstrip(' ↑↓')} ({'lower' if is_better_low(column) else 'higher'} is better)"

    def draw_all(axis: Any) -> None:
        draw_curves(axis, curves, INK, f"seconds per {table.thing} (left is faster)", label)
        _draw_unchanged(axis, table, column)
        axis.margins(0.12)

    return Plot(column, drawn(column, (4.7, 3.5), draw_all), _describe(curves, f"{label} against", table.thing))


def _points(table: PaperTable, method: Method, column: str) -> list[Point]:
    """Seconds and value of every line that has both."""
    found = [(table.value(line, "seconds"), table.value(line, column), line.point) for line in method.lines]
    return [Point(x, y, label) for x, y, label in found if x is not None and y is not None and math.isfinite(y)]


def _draw_unchanged(axis: Any, table: PaperTable, column: str) -> None:
    """The baseline, as a point if it has a value, else as a line at its time; and the noise floor."""
    baseline, *others = [method for method in table.methods if not method.saves_time]
    seconds, value = (table.value(baseline.lines[0], name) for name in ("seconds", column))
    if seconds is not None and value is not None:
        axis.plot(seconds, value, marker="*", ms=11, color=INK)
    elif seconds is not None:
        axis.axvline(seconds, color=INK, ls=":", lw=1.2)
    low, high = axis.get_ylim()
    for method in others:
        floor = table.value(method.lines[0], column)
        if floor is not None and low <= floor <= high:
            axis.axhline(floor, color=INK, ls="--", lw=1)


def _describe(curves: Curves, what: str, thing: str) -> str:
    def in_words(point: Point) -> str:
        return f"{point.distance:.4g} in {point.gain:.3g} s" + (f" at {point.label}" if point.label else "")

    found = [f"{name}: {', '.join(map(in_words, points))}" for name, points in curves.items() if points]
    return f"{what} seconds per {thing}. {'; '.join(found)}."


def drawn(name: str, size: tuple[float, float], draw_on: Callable[[Any], None]) -> str:
    """A plot as SVG for a page, in the page's own text colour."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # the same ids in every run, and different ids in every plot
        "font.size": 9,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        axis: Any = figure.add_subplot()
        axis.patch.set_alpha(0)
        draw_on(axis)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(written.getvalue(), name)


def _inline(svg: str, column: str) -> str:
    """Remove the file header and the fixed size, use the page's text colour, and make the ids unique."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{column}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\g<1>#{column}-", svg)
    return re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*"', "<svg", svg, count=1)
