"""Plots speed against quality, one curve per method (the paper's Figure 5), as SVG for light and dark pages."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toma_lab.report.front import Point, draw, draw_curves, style_of
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


def gain_against_quality(table: PaperTable) -> list[Plot]:
    """Gain in time against every metric that has values: first, with the front, against LPIPS."""
    metrics = [column for column in table.columns if column not in ("seconds", "speedup", "gain")]
    plots = [_plot(table, column) for column in sorted(metrics, key=lambda each: each != "lpips")]
    return [plot for plot in plots if plot is not None]


def legend(table: PaperTable) -> list[Key]:
    """The sign and colour of each method."""
    names = [method.title for method in table.methods if method.saves_time]
    return [Key(name, _SIGNS[index % len(_SIGNS)], style_of(index)["color"]) for index, name in enumerate(names)]


def _plot(table: PaperTable, column: str) -> Plot | None:
    curves = {method.title: _points(table, method, column) for method in table.methods if method.saves_time}
    if not any(curves.values()):
        return None
    label = f"{LABELS[column].rstrip(' ↑↓')} ({'lower' if is_better_low(column) else 'higher'} is better)"
    described = [f"{name}: {', '.join(map(_in_words, points))}" for name, points in curves.items() if points]
    description = f"{label} against the gain in time. {'; '.join(described)}."
    if column == "lpips":
        return Plot(column, drawn(column, (7.0, 4.4), lambda axis: draw(axis, curves, INK)), description)

    def draw_all(axis: Any) -> None:
        draw_curves(axis, curves, INK, "gain in time, × (right is faster)", label)
        axis.margins(0.12)
        low, high = axis.get_ylim()
        unchanged = [table.value(method.lines[0], column) for method in table.methods if not method.saves_time]
        for value, style in zip(unchanged, (":", "--"), strict=False):  # the baseline, and the noise floor
            if value is not None and low <= value <= high:
                axis.axhline(value, color=INK, ls=style, lw=1)

    return Plot(column, drawn(column, (4.7, 3.5), draw_all), description)


def _points(table: PaperTable, method: Method, column: str) -> list[Point]:
    """Those that can be shown. LPIPS of equal images is 0, which has no logarithm."""
    found = [(line.gain, table.value(line, column), line.point) for line in method.lines]
    return [
        Point(gain, value, label)
        for gain, value, label in found
        if gain is not None and value is not None and math.isfinite(value) and (value or column != "lpips")
    ]


def _in_words(point: Point) -> str:
    return f"{point.distance:.4g} at {point.gain:.3g}×" + (f" ({point.label})" if point.label else "")


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
