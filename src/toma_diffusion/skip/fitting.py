"""Fits the weights of skipped steps on generations that were recorded.

A generation is a chain: from the sample of a step and the outputs of its passes, the solver makes the sample of the next.
That is linear, and its coefficients are read off the recorded generations. So the error that a sample has at the end of
a run of skipped steps is linear in their weights. Each skipped step in turn gets the weights that leave the least error
after it: they also take back what the steps before it, and earlier runs, did wrong. Everything is computed from the
inner products of samples and outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toma_diffusion.config import Weights
from toma_diffusion.skip.recording import Trajectory

DEPTH = 3
"""So many outputs are used."""
SHRINK = 0.1
"""How strongly weights are kept to those that are not learned."""
NEARLY_EXACT = 1e-4
"""Of the change of a sample in a step, the share that a solver of first order may leave unexplained."""

Prior = Callable[[int, int], Weights]
"""The weights of a step that was not learned, from the last computed step and that step."""


class Vectors:
    """Recorded vectors, by name, and their inner products. A linear combination of them is a vector of coefficients."""

    def __init__(self, named: Mapping[tuple, Sequence[Tensor]]) -> None:
        self.index = {name: index for index, name in enumerate(named)}
        rows = torch.stack([torch.cat(list(each)) for each in named.values()]).double()
        self.products = rows @ rows.T

    def __getitem__(self, name: tuple) -> Tensor:
        unit = torch.zeros(len(self.index), dtype=torch.float64)
        unit[self.index[name]] = 1
        return unit

    def __contains__(self, name: tuple) -> bool:
        return name in self.index

    def solve(self, features: Sequence[Tensor], target: Tensor, shrink: float = 0.0) -> list[float]:
        """The weights of features whose sum is nearest to the target."""
        matrix = torch.stack(list(features))
        gram = matrix @ self.products @ matrix.T
        wanted = matrix @ self.products @ target
        scale = gram.diagonal().clamp_min(1e-30)
        ridge = torch.diag(scale * (shrink + 1e-9))
        return torch.linalg.solve(gram + ridge, wanted).tolist()

    def energy(self, vector: Tensor) -> float:
        """The squared length."""
        return max(0.0, float(vector @ self.products @ vector))


@dataclass(frozen=True)
class Solver:
    """How the sample of a step follows from the one before and its outputs."""

    sample: float
    outputs: tuple[float, ...]


def fit(
    teachers: Sequence[Trajectory],
    computed: Sequence[int],
    prior: Prior,
    students: Sequence[Trajectory] = (),
    *,
    shrink: float = SHRINK,
    depth: int = DEPTH,
    drift: float = 1.0,
    local: bool = False,
) -> dict[int, Weights]:
    """The weights of all steps that are not computed.

    Args:
        teachers: generations of which every step was computed.
        computed: the steps that are to be computed.
        prior: what is used where nothing was learned; weights are shrunk towards it.
        students: the same generations with skipped steps, if they were made: weights are then fitted to the samples
            and outputs that such generations really have.
        shrink: how strongly.
        depth: how many outputs are used.
        drift: how much of the error that a sample has already is taken back.
    """
    num_steps, passes = teachers[0].num_steps, teachers[0].passes
    named: dict[tuple, list[Tensor]] = {}
    for kind, trajectories in (("teacher", teachers), ("student", students)):
        if not trajectories:
            continue
        for step in range(num_steps):
            named[kind, "x", step] = [each.samples[step] for each in trajectories]
            if all(step in each.outputs for each in trajectories):
                for number in range(passes):
                    named[kind, number, step] = [each.outputs[step][number] for each in trajectories]
        results = [each.result for each in trajectories]
        if all(each is not None for each in results):
            named[kind, "x", num_steps] = results
    vectors = Vectors(named)
    solvers = [_solver(vectors, step, passes) for step in range(num_steps - 1)]
    last = ("teacher", "x", num_steps)
    solvers.append(_solver(vectors, num_steps - 1, passes) if last in vectors else solvers[-1])
    kind = "student" if students else "teacher"
    found: dict[int, Weights] = {}
    chosen = [step for step in computed if step < num_steps]
    for index, start in enumerate(chosen):
        end = chosen[index + 1] if index + 1 < len(chosen) else num_steps
        history = [each for each in reversed(chosen[: index + 1])]
        history = [each for each in history if teachers[0].denoisers[each] == teachers[0].denoisers[start]][:depth]
        outputs = [[vectors[kind, number, each] for each in history] for number in range(passes)]
        begun = vectors[kind, "x", start]
        if start + 1 >= num_steps:
            continue
        if students:
            error = vectors[kind, "x", start + 1] - vectors["teacher", "x", start + 1]
        else:
            error = torch.zeros_like(begun)
        for step in range(start + 1, end):
            solver = solvers[step]
            sample = vectors["teacher", "x", step] + error
            base = prior(start, step)
            wanted = -drift * solver.sample * error
            features = [torch.zeros_like(begun) for _ in range(len(history) + 1)]
            plain = []
            for number, weight in enumerate(solver.outputs):
                latest = outputs[number]
                guess = base.outputs[0] * latest[0] + base.sample * sample + base.last_sample * begun
                plain.append(guess)
                wanted = wanted + weight * (vectors["teacher", number, step] - guess)
                for place, change in enumerate(_changes(latest)):
                    features[place] = features[place] + weight * change
                features[-1] = features[-1] + weight * sample
            solved = vectors.solve(features, wanted, shrink)
            found[step] = _weights(base, solved, len(history))
            for number, weight in enumerate(solver.outputs):
                change = sum(each * one for each, one in zip(solved, [*_changes(outputs[number]), sample], strict=True))
                if number == 0:
                    moved = solver.sample * error
                moved = moved + weight * (plain[number] + change - vectors["teacher", number, step])
            error = moved
    return found


def _changes(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The latest output, and its changes of first, second, … order."""
    changes, row = [], list(outputs)
    while row:
        changes.append(row[0])
        row = [one - other for one, other in zip(row, row[1:], strict=False)]
    return changes


def _weights(base: Weights, solved: Sequence[float], count: int) -> Weights:
    """In terms of outputs, not of their changes."""
    *of_changes, of_sample = solved
    total = torch.zeros(count, dtype=torch.float64)
    total[0] = base.outputs[0]
    for weight, change in zip(of_changes, _changes(list(torch.eye(count, dtype=torch.float64))), strict=True):
        total += weight * change
    return Weights(tuple(total.tolist()), base.sample + of_sample, base.last_sample)


def _solver(vectors: Vectors, step: int, passes: int) -> Solver:
    features = [vectors["teacher", "x", step], *(vectors["teacher", number, step] for number in range(passes))]
    sample, *outputs = vectors.solve(features, vectors["teacher", "x", step + 1])
    return Solver(sample, tuple(outputs))
