"""Which candidates go on to the next rung, and which is the answer. Computed from measurements alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from toma_lab.evaluation.plan import Item, Variant
from toma_lab.metrics.pixels import pool_psnr
from toma_lab.tune.folder import Measurement, TuneFolder
from toma_lab.tune.goal import Figures, Goal


@dataclass(frozen=True)
class Answer:
    """What a search found."""

    chosen: Variant | None
    """None: the model as it is."""
    is_reached: bool
    """Whether the chosen setting reaches the goal."""


def figures_of(measurements: Sequence[Measurement]) -> Figures | None:
    """One setting over all its images; None if it failed on one of them, or has none."""
    if not measurements or any(each.failure for each in measurements):
        return None
    return Figures(
        images=len(measurements),
        speed_up=median(each.original_seconds / each.seconds for each in measurements),
        psnr=pool_psnr([each.psnr for each in measurements]),
        lpips=_mean(each.lpips for each in measurements),
        flicker=_mean(each.flicker for each in measurements),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """None if one is missing."""
    every = list(values)
    known = [value for value in every if value is not None]
    return fmean(known) if len(known) == len(every) else None


def figures_in(folder: TuneFolder, variant: Variant, items: Sequence[Item]) -> Figures | None:
    """Those of the images that were measured, out of these."""
    found = [folder.measurement(variant, item) for item in items]
    return figures_of([each for each in found if each is not None])


def ranked(figures: Mapping[Variant, Figures], goal: Goal) -> list[Variant]:
    """The most promising first.

    Those that may reach the goal come first, by layers: the front, which nothing beats in both speed and distance; then
    what would be the front without it; and so on. The others follow by how little they miss the goal.
    """
    rest = [variant for variant, each in figures.items() if goal.may_hold(each)]
    order: list[Variant] = []
    while rest:
        layer = [one for one in rest if not any(figures[other].beats(figures[one]) for other in rest)]
        order += sorted(layer, key=lambda variant: goal.preference(figures[variant]))
        rest = [variant for variant in rest if variant not in layer]
    others = [variant for variant in figures if variant not in order]
    # What is no faster than the original comes last, however near it is.
    return order + sorted(others, key=lambda each: (figures[each].speed_up <= 1, goal.shortfall(figures[each])))


def survivors(figures: Mapping[Variant, Figures], goal: Goal, at_least: int) -> list[Variant]:
    """The better half, rounded up, but not fewer than `at_least`."""
    return ranked(figures, goal)[: max(at_least, (len(figures) + 1) // 2)]


def finalists_of(figures: Mapping[Variant, Figures], goal: Goal, count: int) -> list[Variant]:
    """Those to measure at the end: mostly such that reach the goal already, and the best of those that may."""
    order = ranked(figures, goal)
    safe = sorted(
        (each for each in order if goal.holds(figures[each])), key=lambda each: goal.preference(figures[each])
    )
    others = [variant for variant in order if variant not in safe]
    chosen = [*safe[: count - 1], *others[:1], *safe[count - 1 :], *others[1:]]
    return chosen[:count]


def substitutes(figures: Mapping[Variant, Figures], goal: Goal, tried: Sequence[Variant]) -> list[Variant]:
    """Those to measure if no finalist reaches the goal: the likeliest to reach it first."""
    left = [variant for variant, each in figures.items() if variant not in tried and goal.may_hold(each)]
    return sorted(left, key=lambda variant: goal.shortfall(figures[variant]))


def answer(finalists: Mapping[Variant, Figures], goal: Goal) -> Answer:
    """The best finalist that reaches the goal.

    If there is none: within a limit of quality the model as it is; at a wanted speed the fastest.
    """
    reaching = [variant for variant, each in finalists.items() if goal.holds(each)]
    if reaching:
        return Answer(min(reaching, key=lambda variant: goal.preference(finalists[variant])), is_reached=True)
    if goal.speed_up is None or not finalists:
        return Answer(None, is_reached=False)
    fastest = min(finalists, key=lambda variant: goal.shortfall(finalists[variant]))
    return Answer(fastest if finalists[fastest].speed_up > 1 else None, is_reached=False)
