"""Fits the weights of skipped steps on generations that were recorded.

A generation is a chain: from the sample of a step and the outputs of its passes, the solver makes the sample of the
next one. That is linear, and its coefficients are read off the recorded generations. So the error that a sample has at
the end of a run of skipped steps is linear in their weights. Each skipped step in turn gets the weights that leave the
least error after it: they also take back what the steps before it did wrong. A computed step that comes after skipped
ones shows how wrong they were; weights of its own take that back. Every pass of guidance has weights of its own: what
guidance adds changes in another way than what it is added to. Everything is computed from the inner products of samples
and outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from toma_diffusion.skip.learned import Weights
from toma_diffusion.skip.recording import Trajectory

DEPTH = 3
"""So many outputs are used to predict one."""
DEPTH_OF_CORRECTIONS = 2
"""So many to correct one, its own among them."""
SHRINK = 0.01
"""How strongly weights are kept to those that are not learned."""
NEARLY_EXACT = 1e-4
"""A solver that leaves more than this share of a sample's change unexplained also looks at the step before."""
NOT_A_SAMPLE = 0.05
"""If the last step leaves more than this share unexplained, what was returned is something else than a sample."""
Name = tuple[str, str | int, int]
"""Of a vector: of which kind of generation, the sample `"x"` or the output of a pass by its number, and the step."""
Prior = Callable[[Sequence[int], int], Weights]
"""The weights of a step that was not learned, from the last computed steps, the latest first, and that step."""


class Vectors:
    """Recorded vectors, by name, and their inner products. A linear combination of them is a vector of coefficients."""

    def __init__(self, named: Mapping[Name, Sequence[Tensor]]) -> None:
        self.index = {name: index for index, name in enumerate(named)}
        rows = torch.stack([torch.cat(list(each)) for each in named.values()]).double()
        self.products = rows @ rows.T

    def __getitem__(self, name: Name) -> Tensor:
        unit = torch.zeros(len(self.index), dtype=torch.float64)
        unit[self.index[name]] = 1
        return unit

    def __contains__(self, name: Name) -> bool:
        return name in self.index

    def solve(self, features: Sequence[Tensor], target: Tensor, shrink: float = 0.0) -> list[float]:
        """The weights of features whose sum is nearest to the target."""
        matrix = torch.stack(list(features))
        gram = matrix @ self.products @ matrix.T
        wanted = matrix @ self.products @ target
        scale = gram.diagonal().clamp_min(1e-30)
        solved: list[float] = torch.linalg.solve(gram + torch.diag(scale * (shrink + 1e-9)), wanted).tolist()
        return solved

    def energy(self, vector: Tensor) -> float:
        return max(0.0, float(vector @ self.products @ vector))


@dataclass(frozen=True)
class Solver:
    """How the sample of the next step follows from those of this one and the one before, and from their outputs."""

    samples: tuple[float, ...]
    outputs: tuple[tuple[float, ...], ...]

    def next(self, samples: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Samples and outputs of this step, and of the one before if it needs them."""
        terms = list(zip(self.samples, samples, strict=False))
        for weights, passes in zip(self.outputs, outputs, strict=False):
            terms += zip(weights, passes, strict=True)
        return torch.stack([weight * each for weight, each in terms]).sum(0)


class Fit:
    """Recorded generations of which every step was computed, and the weights that follow from them.

    Weights are shrunk towards the prior.
    """

    def __init__(self, teachers: Sequence[Trajectory], prior: Prior) -> None:
        self.teachers, self.prior = teachers, prior
        self.num_steps, self.passes = teachers[0].num_steps, teachers[0].passes
        self.vectors = Vectors(self._named("teacher", teachers))
        self.solvers = [each for step in range(self.num_steps - 1) if (each := self._solver(step)) is not None]
        last = self._solver(self.num_steps - 1) if ("teacher", "x", self.num_steps) in self.vectors else None
        self.solvers.append(last or self.solvers[-1])  # what returns pictures does not say what the last step made

    def weights(
        self, computed: Sequence[int], students: Vectors | None = None, shrink: float = SHRINK
    ) -> dict[int, tuple[Weights, ...]]:
        """The weights of all steps that are not computed, for every pass.

        If the same generations were made with these skipped steps (`students`), weights are fitted to the samples and
        outputs that such generations really have.
        """
        vectors, kind = (self.vectors, "teacher") if students is None else (students, "student")
        found: dict[int, tuple[Weights, ...]] = {}
        for start, end in self._runs(computed):
            run = _Run(self, vectors, kind, self._history(computed, start)[:DEPTH])
            for step in range(start + 1, end):
                found[step] = run.fit(step, shrink)
        return found

    def with_students(self, students: Sequence[Trajectory]) -> Vectors:
        """The vectors of generations that skipped steps too."""
        return Vectors(self._named("teacher", self.teachers) | self._named("student", students))

    def corrections(self, computed: Sequence[int], students: Vectors, shrink: float) -> dict[int, tuple[Weights, ...]]:
        """The weights of computed steps that come after skipped ones.

        Their outputs show how wrong the predicted ones were. What is added to them takes that back, as far as it shows:
        in generations that really skipped steps a network also follows a sample that has drifted.
        """
        found = {}
        for start, end in self._runs(computed):
            if start + 1 < end < self.num_steps:
                history = self._history(computed, end)[:DEPTH_OF_CORRECTIONS]
                if start in history:
                    found[end] = _Run(self, students, "student", history).correct(shrink)
        return found

    @property
    def last_sample(self) -> Tensor:
        steps = (self.num_steps - 1, self.num_steps - 2)
        samples = [self.vectors["teacher", "x", step] for step in steps]
        outputs = [[self.vectors["teacher", number, step] for number in range(self.passes)] for step in steps]
        return self.solvers[-1].next(samples, outputs)

    def _history(self, computed: Sequence[int], step: int) -> list[int]:
        """The computed steps of the same denoiser up to this one, the latest first."""
        denoisers = self.teachers[0].denoisers
        return [each for each in reversed(computed) if each <= step and denoisers[each] == denoisers[step]]

    def _runs(self, computed: Sequence[int]) -> list[tuple[int, int]]:
        """Every computed step, with the next one."""
        return list(zip(computed, (*computed[1:], self.num_steps), strict=True))

    def error(self, computed: Sequence[int], weights: Mapping[int, tuple[Weights, ...]] | None) -> float:
        """How far the samples after runs of skipped steps are from the teachers', in all, with these weights or the
        prior's. Every run begins with a sample of the teachers."""
        total = 0.0
        for start, end in self._runs(computed):
            if end == start + 1:
                continue
            run = _Run(self, self.vectors, "teacher", self._history(computed, start))
            for step in range(start + 1, end):
                run.follow(step, [self.prior(run.history, step)] * self.passes if weights is None else weights[step])
            size = self.vectors.energy(self.vectors["teacher", "x", min(end, self.num_steps - 1)])
            total += self.vectors.energy(run.samples_off[end]) / size
        return total

    def _named(self, kind: str, trajectories: Sequence[Trajectory]) -> dict[Name, list[Tensor]]:
        named: dict[Name, list[Tensor]] = {}
        for step in range(trajectories[0].num_steps):
            named[kind, "x", step] = [each.samples[step] for each in trajectories]
            for number in range(trajectories[0].passes):
                named[kind, number, step] = [each.outputs[step][number] for each in trajectories]
        results = [each.result for each in trajectories if each.result is not None]
        if len(results) == len(trajectories):
            named[kind, "x", trajectories[0].num_steps] = results
        return named

    def _solver(self, step: int) -> Solver | None:
        """Read off the generations. None if what was returned is no sample after the last step."""
        vectors, target = self.vectors, self.vectors["teacher", "x", step + 1]
        change = vectors.energy(target - vectors["teacher", "x", step])
        for lags in (1, 2) if step else (1,):
            steps = range(step, step - lags, -1)
            features = [vectors["teacher", "x", each] for each in steps]
            features += [vectors["teacher", number, each] for each in steps for number in range(self.passes)]
            solved = vectors.solve(features, target)
            left = target - sum(weight * each for weight, each in zip(solved, features, strict=True))
            unexplained = vectors.energy(left)
            if unexplained <= NEARLY_EXACT * change:
                break
        if step == self.num_steps - 1 and unexplained > NOT_A_SAMPLE * change:
            return None
        outputs = torch.tensor(solved[lags:]).reshape(lags, self.passes).tolist()
        return Solver(tuple(solved[:lags]), tuple(map(tuple, outputs)))


class _Run:
    """A computed step and the skipped ones after it: how far samples and outputs are from those of the teachers.

    It goes through the generations of one `kind`, teachers or students. `history` are the last computed steps, the
    latest first.
    """

    def __init__(self, of: Fit, vectors: Vectors, kind: str, history: Sequence[int]) -> None:
        self.of, self.vectors, self.history, self.start = of, vectors, history, history[0]
        self.begun = vectors[kind, "x", self.start]
        self.outputs = [[vectors[kind, number, each] for each in history] for number in range(of.passes)]
        self.samples_off: dict[int, Tensor] = {}
        self.outputs_off: dict[int, list[Tensor]] = {}
        for step in (self.start - 1, self.start):
            if step >= 0:
                self.samples_off[step] = vectors[kind, "x", step] - vectors["teacher", "x", step]
                self.outputs_off[step] = [
                    vectors[kind, number, step] - vectors["teacher", number, step] for number in range(of.passes)
                ]
        self.samples_off[self.start + 1] = self._sample_off(self.start + 1)

    def fit(self, step: int, shrink: float) -> tuple[Weights, ...]:
        """The weights of the next step of the run, which must be the one after the last."""
        base = self.of.prior(self.history, step)
        return self._fitted(step, base, self._predict(step, [base] * self.of.passes), shrink)

    def correct(self, shrink: float) -> tuple[Weights, ...]:
        """The weights of the computed step that the run begins with, its own output first."""
        return self._fitted(self.start, Weights(), self.begun, shrink)

    def _fitted(self, step: int, base: Weights, sample: Tensor, shrink: float) -> tuple[Weights, ...]:
        vectors, passes = self.vectors, range(self.of.passes)
        # What may be added to the prediction of one pass, or of all of them: the sample.
        terms: list[tuple[tuple[int, ...], Tensor]] = [
            ((number,), change) for number in passes for change in changes_of(self.outputs[number])
        ]
        terms.append((tuple(passes), sample))
        of_solver = self.of.solvers[step].outputs[0]
        effects = [sum(of_solver[number] for number in numbers) * term for numbers, term in terms]
        solved = vectors.solve(effects, -self._sample_off(step + 1), shrink)
        for weight, (numbers, term) in zip(solved, terms, strict=True):
            for number in numbers:
                self.outputs_off[step][number] = self.outputs_off[step][number] + weight * term
        self.samples_off[step + 1] = self._sample_off(step + 1)
        *of_outputs, of_sample = solved
        depth = len(of_outputs) // len(passes)
        return tuple(_weights(base, of_outputs[number * depth : (number + 1) * depth], of_sample) for number in passes)

    def follow(self, step: int, weights: Sequence[Weights]) -> None:
        """Predict the next step of the run with these weights."""
        self._predict(step, weights)
        self.samples_off[step + 1] = self._sample_off(step + 1)

    def _predict(self, step: int, weights: Sequence[Weights]) -> Tensor:
        """Note how far the outputs of a step are then from the teachers'. Returns its sample."""
        sample = self.vectors["teacher", "x", step] + self.samples_off[step]
        self.outputs_off[step] = [
            sum(weight * each for weight, each in zip(of_pass.outputs, self.outputs[number], strict=False))
            + of_pass.sample * sample
            + of_pass.last_sample * self.begun
            - self.vectors["teacher", number, step]
            for number, of_pass in enumerate(weights)
        ]
        return sample

    def _sample_off(self, step: int) -> Tensor:
        """How far the sample of a step is from the teachers', from what is known of the steps before."""
        solver = self.of.solvers[step - 1]
        steps = [each for each in (step - 1, step - 2) if each in self.samples_off][: len(solver.samples)]
        return solver.next([self.samples_off[each] for each in steps], [self.outputs_off[each] for each in steps])


def changes_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The latest output, and its changes of first, second, … order."""
    changes, row = [], list(outputs)
    while row:
        changes.append(row[0])
        row = [one - other for one, other in pairwise(row)]
    return changes


def _weights(base: Weights, of_changes: Sequence[float], of_sample: float) -> Weights:
    """In terms of outputs, not of their changes."""
    count = len(of_changes)
    total = torch.zeros(count, dtype=torch.float64)
    total[: len(base.outputs)] += torch.tensor(base.outputs[:count], dtype=torch.float64)
    for weight, change in zip(of_changes, changes_of(list(torch.eye(count, dtype=torch.float64))), strict=True):
        total += weight * change
    return Weights(tuple(total.tolist()), base.sample + of_sample, base.last_sample)
