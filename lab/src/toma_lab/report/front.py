"""Curves of methods over their settings, and the front: what no other point beats in both time and distance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLORS = ("#2b7fd4", "#d9622b", "#2a9d6f", "#b04fc4", "#c43b52", "#8a7a1f", "#2f9fb3", "#7d6ad6")
MARKERS = "os^DvPXh"


@dataclass(frozen=True)
class Point:
    """A method at one setting."""

    gain: float
    """How many times faster than the model as it is."""
    distance: float
    """LPIPS. Lower is nearer."""
    label: str = ""
    """The ratio, the steps, the threshold or the interval."""


Curves = Mapping[str, Sequence[Point]]
"""Points by the title of their method."""


def front(points: Iterable[Point]) -> list[Point]:
    """Those that no other point beats in both, from the slowest to the fastest. A gain below 1 is none."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (-each.gain, each.distance)):
        if point.gain > 1 and (not best or point.distance < best[-1].distance):
            best.append(point)
    return best[::-1]


def style_of(index: int) -> dict[str, Any]:
    """Colour and marker of the curve at that place, both again after eight; the second eight are dotted."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": "-" if index < len(COLORS) else ":",
    }


def draw_curves(axis: Any, curves: Curves, ink: str, xlabel: str, ylabel: str) -> None:
    """Draw all curves on axes of matplotlib. Only their last points have labels: at all points they would overlap."""
    for index, (title, points) in enumerate(curves.items()):
        ordered = sorted(points, key=lambda point: (point.gain, point.distance))
        style = style_of(index)
        axis.plot(*_xy(ordered), markersize=5, linewidth=1.3, label=title, **style)
        for point in ordered[-1:]:
            place = {"xytext": (5, -2), "textcoords": "offset points", "fontsize": 7}
            axis.annotate(point.label, (point.gain, point.distance), color=style["color"], **place)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    tidy(axis, ink)


def draw(axis: Any, curves: Curves, ink: str) -> None:
    """Draw gain against distance, and the front in the colour of the text."""
    draw_curves(axis, curves, ink, "gain in time, × (right is faster)", "LPIPS (down is closer)")
    draw_front(axis, (point for points in curves.values() for point in points), ink)
    axis.set_yscale("log")
    axis.margins(0.06)


def draw_front(axis: Any, points: Iterable[Point], ink: str) -> None:
    """A broken line through the front, and a dotted one where nothing is gained."""
    axis.plot(*_xy(front(points)), color=ink, linestyle="--", linewidth=1.2, alpha=0.7, zorder=0)
    axis.axvline(1, color=ink, linestyle=":", linewidth=1)


def tidy(axis: Any, ink: str) -> None:
    """A light grid, and two sides of the frame."""
    axis.grid(color=ink, alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.gain for point in points], [point.distance for point in points]
