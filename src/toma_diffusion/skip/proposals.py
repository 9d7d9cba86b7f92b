"""Proposes other weights and other steps, which may be closer than the best that learning has found so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from toma_diffusion.skip.fitting import SHRINK, Fit, changes_of
from toma_diffusion.skip.learned import Weights
from toma_diffusion.skip.recording import Trajectory
from toma_diffusion.skip.schedule import with_required

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
    """Proposals from recorded generations. Every one computes the `required` steps."""

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


class Places:
    """Proposes which steps to compute: the lists with the least sum of errors over their runs of skipped steps.

    The error of a run is what is left of its whole change after the best weights, which depend on the two last computed
    steps. How much an error in a certain step counts in the result is not known, so there is a proposal for each of
    several guesses.
    """

    def __init__(self, of: Fit) -> None:
        self.num_steps, vectors = of.num_steps, of.vectors
        samples = torch.stack([*(vectors["teacher", "x", step] for step in range(of.num_steps)), of.last_sample])
        sizes = ((samples @ vectors.products) * samples).sum(1)
        self.errors: dict[tuple[int | None, int], list[float]] = {}
        for last in range(of.num_steps):
            for before in (None, *range(last)):
                if (before is None) != (last == 0):
                    continue
                history = [last] if before is None else [last, before]
                terms = [vectors["teacher", "x", last]]
                for number in range(of.passes):
                    terms += changes_of([vectors["teacher", number, each] for each in history])
                matrix, targets = torch.stack(terms), samples[last + 1 :]
                gram, wanted = matrix @ vectors.products @ matrix.T, matrix @ vectors.products @ targets.T
                ridge = torch.diag(gram.diagonal() * 1e-9)
                solved = torch.linalg.solve(gram + ridge, wanted)
                energies = (sizes[last + 1 :] - (wanted * solved).sum(0)).clamp_min(0)
                energies[0] = 0.0  # nothing is skipped
                self.errors[before, last] = energies.tolist()

    def best(self, count: int, growth: float) -> tuple[int, ...]:
        """The steps to compute. An error at the end counts `growth` times as much as one at the beginning."""
        end = self.num_steps
        cost: dict[tuple[int | None, int], tuple[float, tuple[int, ...]]] = {(None, 0): (0.0, (0,))}
        for number in range(1, count):
            better: dict[tuple[int | None, int], tuple[float, tuple[int, ...]]] = {}
            for (before, last), (total, steps) in cost.items():
                for step in range(last + 1, end - (count - number) + 1):
                    error = self.errors[before, last][step - last - 1]
                    found = total + error * growth ** (step / end)
                    if (last, step) not in better or found < better[last, step][0]:
                        better[last, step] = found, (*steps, step)
            cost = better
        finals = [(total + self.errors[key][end - key[1] - 1] * growth, steps) for key, (total, steps) in cost.items()]
        return min(finals)[1]
