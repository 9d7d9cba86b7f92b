"""Which candidates go on to the next rung, and which is the answer. Computed from measurements alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from toma_lab.columns import Column
from toma_lab.metrics.pixels import pool_psnr
from toma_lab.plan import Item
from toma_lab.rows import Row, number
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import Figures, Goal


def figures_of(rows: Sequence[Row]) -> Figures | None:
    """One setting over all its images; None if it failed on one of them, or has none."""
    if not rows or any(row.get("failure") for row in rows):
        return None
    return Figures(
        images=len(rows),
        speed_up=median(float(row["baseline_seconds"]) / float(row["seconds"]) for row in rows),
        psnr=pool_psnr([float(row["psnr"]) for row in rows]),
        lpips=_mean(number(row, "lpips") for row in rows),
        flicker=_mean(number(row, "flicker") for row in rows),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """None if one is missing."""
    every = list(values)
    known = [value for value in every if value is not None]
    return fmean(known) if len(known) == len(every) else None


def figures_in(folder: TuneFolder, column: Column, items: Sequence[Item]) -> Figures | None:
    """Those of the images that were measured, out of these."""
    return figures_of([row for item in items if (row := folder.item_row(column, item))])


def ranked(figures: Mapping[Column, Figures], goal: Goal) -> list[Column]:
    """The most promising first.

    Those that may reach the goal come first, by layers: the front, which nothing beats in both speed and distance; then
    what would be the front without it; and so on. The others follow by how little they miss the goal.
    """
    rest = [column for column, each in figures.items() if goal.may_hold(each)]
    order: list[Column] = []
    while rest:
        layer = [one for one in rest if not any(figures[other].beats(figures[one]) for other in rest)]
        order += sorted(layer, key=lambda column: goal.preference(figures[column]))
        rest = [column for column in rest if column not in layer]
    others = [column for column in figures if column not in order]
    # What is no faster than the original comes last, however near it is.
    return order + sorted(others, key=lambda each: (figures[each].speed_up <= 1, goal.shortfall(figures[each])))


def survivors(figures: Mapping[Column, Figures], goal: Goal, at_least: int) -> list[Column]:
    """The better half, rounded up, but not fewer than `at_least`."""
    return ranked(figures, goal)[: max(at_least, (len(figures) + 1) // 2)]


def finalists_of(figures: Mapping[Column, Figures], goal: Goal, count: int) -> list[Column]:
    """Those to measure at the end: mostly such that reach the goal already, and the best of those that may."""
    order = ranked(figures, goal)
    safe = sorted(
        (each for each in order if goal.holds(figures[each])), key=lambda each: goal.preference(figures[each])
    )
    others = [column for column in order if column not in safe]
    chosen = [*safe[: count - 1], *others[:1], *safe[count - 1 :], *others[1:]]
    return chosen[:count]


def substitutes(figures: Mapping[Column, Figures], goal: Goal, tried: Sequence[Column]) -> list[Column]:
    """Those to measure if no finalist reaches the goal: the likeliest to reach it first."""
    left = [column for column, each in figures.items() if column not in tried and goal.may_hold(each)]
    return sorted(left, key=lambda column: goal.shortfall(figures[column]))


def answer(finalists: Mapping[Column, Figures], goal: Goal) -> tuple[Column | None, bool]:
    """The best finalist that reaches the goal, and whether there is one.

    If there is none: within a limit of quality the model as it is, which is None; at a wanted speed the fastest.
    """
    reaching = [column for column, each in finalists.items() if goal.holds(each)]
    if reaching:
        return min(reaching, key=lambda column: goal.preference(finalists[column])), True
    if goal.speed_up is None or not finalists:
        return None, False
    fastest = min(finalists, key=lambda column: goal.shortfall(finalists[column]))
    return (fastest if finalists[fastest].speed_up > 1 else None), False
