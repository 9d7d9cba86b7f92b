"""Proposes other weights and other steps, which may be closer than the best that learning has found so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from toma_diffusion.skip.about import with_required
from toma_diffusion.skip.fitting import SHRINK, Fit, Places
from toma_diffusion.skip.learned import Weights
from toma_diffusion.skip.recording import Trajectory

GROWTHS = (1.0, 4.0, 16.0)
"""How much more an error at the end may count than one at the beginning: guesses for lists of steps."""
STRENGTHS = (SHRINK, 10 * SHRINK, 100 * SHRINK)
"""How strongly weights may be kept to those that are not learned."""
STRENGTHS_OF_CORRECTIONS = (0.5, 0.1)
MOST_STEPS = 150
"""With more, lists of steps are only changed, not proposed: that takes minutes then."""


@dataclass
class Found:
    """The best of one number of computed steps so far."""

    computed: tuple[int, ...]
    weights: dict[int, tuple[Weights, ...]]
    distance: float = math.inf
    """The geometric mean over the generations that are learned from."""
    distances: list[float] = field(default_factory=list)
    students: list[Trajectory] = field(default_factory=list)


class Proposals:
    """Proposals from recorded generations.

    Args:
        fit: of those generations.
        required: steps that must be computed.
    """

    def __init__(self, fit: Fit, required: Sequence[int]) -> None:
        self.fit, self.required = fit, required

    def near(self, best: Callable[[], Found]) -> Iterator[Found]:
        """What may be closer than the best so far, which changes while they are tried; first itself."""
        current: Found | None = best()
        assert current is not None
        yield current  # as it is: to know its distance
        tried = {current.computed}
        lists = self._lists(len(current.computed))
        current = None
        while current is not best():
            current = best()
            for candidate in self._near(current, lists, tried):
                yield candidate
                if best() is not current:
                    break

    def _lists(self, count: int) -> list[tuple[int, ...]]:
        """Lists of steps with small errors."""
        if self.fit.num_steps > MOST_STEPS:
            return []
        return [with_required(self._places.best(count, growth), self.required) for growth in GROWTHS]

    @cached_property
    def _places(self) -> Places:
        return Places(self.fit)

    def _near(self, best: Found, lists: Sequence[tuple[int, ...]], tried: set[tuple[int, ...]]) -> Iterator[Found]:
        """Other weights for the same steps, fitted to generations that really skipped them; then other steps."""
        predicted = {step: each for step, each in best.weights.items() if step not in best.computed}
        students = self.fit.with_students(best.students)
        for strength in STRENGTHS_OF_CORRECTIONS:
            yield Found(best.computed, predicted | self.fit.corrections(best.computed, students, strength))
        for strength in STRENGTHS:
            yield Found(best.computed, self.fit.weights(best.computed, students, strength))
        for computed in [*lists, *moved(best.computed, self.fit.num_steps, self.required)]:
            if computed not in tried:
                tried.add(computed)
                yield Found(computed, self.fit.weights(computed))


def moved(computed: tuple[int, ...], num_steps: int, required: Sequence[int]) -> list[tuple[int, ...]]:
    """The lists in which one step is another."""
    found = []
    for place in range(1, len(computed)):
        for step in (computed[place] - 1, computed[place] + 1):
            if 0 < step < num_steps and step not in computed and computed[place] not in required:
                found.append(tuple(sorted({*computed, step} - {computed[place]})))
    return found
