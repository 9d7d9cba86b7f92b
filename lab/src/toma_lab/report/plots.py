"""Plots speed against quality, one curve per method (the paper's Figure 5), as SVG for light and dark pages."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toma_lab.report.front import Point, describe, draw, style_of
from toma_lab.report.paper_table import LABELS, Line, Method, PaperTable, is_better_low

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
    if "lpips" not in table.columns:
        return None
    place = table.columns.index("lpips")
    curves = {
        method.title: [
            Point(line.gain, value, line.point)
            for line in method.lines
            if line.gain is not None and (value := line.cells[place].value)  # equal images have no logarithm
        ]
        for method in table.methods
        if method.saves_time
    }
    if not any(curves.values()):
        return None
    svg = drawn("front", (7.0, 4.4), lambda axis: draw(axis, curves, INK))
    return Plot("front", svg, describe(curves))


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

    def draw_all(axis: Any) -> None:
        for index, points in enumerate(curves.values()):
            _plot_curve(axis, points, index)
        _plot_unmerged(axis, table, column)
        axis.set(xlabel=f"seconds per {table.thing} (left is faster)", ylabel=_axis_label(column))
        axis.margins(0.12)
        axis.grid(color=INK, alpha=0.12, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)

    return Plot(column, drawn(column, (4.7, 3.5), draw_all), _describe(table, column, curves))


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


def _points(table: PaperTable, method: Method, column: str) -> list[tuple[float, float, str]]:
    """(seconds, value, ratio or other setting) of every line that has both."""
    seconds, figure = table.columns.index("seconds"), table.columns.index(column)
    points = []
    for line in method.lines:
        x, y = line.cells[seconds].value, line.cells[figure].value
        if x is not None and y is not None and math.isfinite(y):
            points.append((x, y, line.point))
    return sorted(points, key=lambda point: point[2])


def _plot_curve(axis: Any, points: Sequence[tuple[float, float, str]], index: int) -> None:
    style = style_of(index)
    axis.plot([x for x, _, _ in points], [y for _, y, _ in points], ms=6, **style)
    for x, y, ratio in points[-1:]:  # labels at all points would overlap
        axis.annotate(ratio, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8, color=style["color"])


def _plot_unmerged(axis: Any, table: PaperTable, column: str) -> None:
    """The baseline, as a point if it has a value, else as a line at its time; and the noise floor."""
    baseline, *others = [method for method in table.methods if not method.saves_time]
    points = _points(table, baseline, column)
    if points:
        axis.plot(points[0][0], points[0][1], marker="*", ms=11, color=INK)
    elif (seconds := _value(table, baseline.lines[0], "seconds")) is not None:
        axis.axvline(seconds, color=INK, ls=":", lw=1.2)
    for method in others:
        floor = _value(table, method.lines[0], column)
        low, high = axis.get_ylim()
        if floor is not None and low <= floor <= high:
            axis.axhline(floor, color=INK, ls="--", lw=1)


def _value(table: PaperTable, line: Line, column: str) -> float | None:
    return line.cells[table.columns.index(column)].value if column in table.columns else None


def _axis_label(column: str) -> str:
    name = LABELS[column].rstrip(" ↑↓")
    return f"{name} ({'lower' if is_better_low(column) else 'higher'} is better)"


def _describe(table: PaperTable, column: str, curves: dict[str, list[tuple[float, float, str]]]) -> str:
    points_in_words = "; ".join(
        f"{name}: " + ", ".join(f"{y:.4g} in {x:.3g} s at {ratio}" for x, y, ratio in points)
        for name, points in curves.items()
        if points
    )
    return f"{_axis_label(column)} against seconds per {table.thing}. {points_in_words}."


def _inline(svg: str, column: str) -> str:
    """Remove the file header and the fixed size, use the page's text colour, and make the ids unique."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{column}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\g<1>#{column}-", svg)
    return re.sub(r'<svg width="[^"]*" height="[^"]*"|<svg height="[^"]*"', "<svg", svg, count=1)
