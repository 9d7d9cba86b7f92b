"""The plot of a search: the front of speed against distance."""

from __future__ import annotations

from typing import Any

from toma_lab.columns import Column
from toma_lab.report.front import COLORS, MARKERS, Point, draw_front, front, tidy
from toma_lab.report.plots import INK, Key, Plot, drawn
from toma_lab.tune.outcome import Outcome, Result, in_words

KINDS = ("fewer steps", "merging", "skipped steps", "merging and skipped steps", "cache", "several together")
SIGNS = "●■▲◆▼✚"
LEAST_LPIPS, MOST_PSNR = 1e-4, 60.0
"""Where equal images are drawn, which have no logarithm."""
CHOSEN = "#d6336c"
FAST_ENOUGH_TO_SHOW = 0.9
"""What is slower than this is noted in the table alone: it would take up half of the plot."""


def kind_of(column: Column, steps: int) -> str:
    """Which of `KINDS` it is in generations of so many steps."""
    own = ["merging"] if column.merges(steps) else []
    own += ["skipped steps"] if column.skips(steps) else []
    kinds = ([" and ".join(own)] if own else []) + [
        "cache" if each.is_cache else "fewer steps" for each in column.shortcuts
    ]
    return kinds[0] if len(kinds) == 1 else "several together"


def front_plot(outcome: Outcome, steps: int) -> Plot | None:
    """Every candidate as a point, the front, the limit, and what was chosen."""
    shown = [each for each in outcome.results if each.figures and each.figures.speed_up >= FAST_ENOUGH_TO_SHOW]
    if not shown:
        return None
    best = front(_point(each) for each in shown)
    on_front = [f"{each.column.title} ({in_words(each.figures)})" for each in shown if _point(each) in best]
    svg = drawn("tune-front", (7.0, 4.4), lambda axis: _draw(axis, outcome, shown, steps))
    return Plot("front", svg, f"Distance against speed-up. The front: {', '.join(on_front) or 'empty'}.")


def kinds_shown(outcome: Outcome, steps: int) -> list[Key]:
    present = {kind_of(each.column, steps) for each in outcome.results if each.figures}
    return [Key(kind, SIGNS[index], COLORS[index]) for index, kind in enumerate(KINDS) if kind in present]


def _point(result: Result) -> Point:
    """PSNR upside down, so that down is closer in both."""
    figures = result.figures
    assert figures is not None
    distance = -min(figures.psnr, MOST_PSNR) if figures.lpips is None else max(figures.lpips, LEAST_LPIPS)
    return Point(figures.speed_up, distance, result.column.title)


def _draw(axis: Any, outcome: Outcome, shown: list[Result], steps: int) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    by_lpips = all(each.figures and each.figures.lpips is not None for each in shown)
    for result in shown:
        place, point = KINDS.index(kind_of(result.column, steps)), _point(result)
        fill = COLORS[place] if result.is_finalist else "none"
        style = {"marker": MARKERS[place], "facecolors": fill, "edgecolors": COLORS[place]}
        axis.scatter(point.gain, point.distance, s=42, linewidths=1.4, zorder=3, **style)
    draw_front(axis, map(_point, shown), INK)
    if outcome.chosen is not None and outcome.chosen in shown:
        point = _point(outcome.chosen)
        where = (point.gain, point.distance)
        axis.scatter(*where, s=230, facecolors="none", edgecolors=CHOSEN, linewidths=2.2, zorder=4)
        style = {"textcoords": "offset points", "ha": "center", "color": CHOSEN, "fontweight": "bold"}
        axis.annotate("chosen", where, xytext=(0, 12), **style)
    _draw_limit(axis, outcome, by_lpips)
    if by_lpips:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(lambda value, place: f"{abs(value):g}")
    label = "LPIPS (down is closer)" if by_lpips else "PSNR, dB (down is closer)"
    axis.set(xlabel="speed-up, × (right is faster)", ylabel=label)
    axis.margins(0.08)
    tidy(axis, INK)


def _draw_limit(axis: Any, outcome: Outcome, by_lpips: bool) -> None:
    goal = outcome.goal
    style = {"color": CHOSEN, "linewidth": 1.2, "alpha": 0.8}
    limit = goal.max_lpips if by_lpips else None if goal.min_psnr is None else -goal.min_psnr
    if goal.speed_up is not None:
        axis.axvline(goal.speed_up, **style)
        axis.text(goal.speed_up, 1.0, " wanted", color=CHOSEN, transform=axis.get_xaxis_transform(), va="top")
    elif limit is not None:
        axis.axhline(limit, **style)
        axis.text(1.0, limit, "limit ", color=CHOSEN, transform=axis.get_yaxis_transform(), ha="right", va="bottom")
