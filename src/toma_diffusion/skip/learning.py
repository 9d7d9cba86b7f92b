"""Learns, on a user's own model, which steps to compute and how to predict the others.

Some generations are made whole and recorded. From all but the last of them weights are fitted in closed form. With time
left, whole generations are made with other weights, with corrections of computed steps and with other lists of steps,
and what is closer to the recorded ones is kept. At the end the last generations, which nothing was learned from, say
whether it is closer there than with nothing learned. If not, it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import Always, BySteps, Skip
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.fitting import Fit
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights
from toma_diffusion.skip.proposals import Found, Proposals
from toma_diffusion.skip.recording import About, Recorder, Trajectory
from toma_diffusion.skip.schedule import lists_of
from toma_diffusion.skip.store import NoStore, Store

FEWEST = 3
"""Generations to learn from: two to fit weights on, and one to check them."""
CHECKED = 4
"""Of so many generations one is not learned from, and checks."""
HOPELESS = 1.3
"""A try that is so many times farther on its first generations is not continued."""
LEAST = 1e-30
"""The least distance: it has a logarithm."""
REPEATED = 0.01
"""A generation that is made again may differ by so much, relatively: decoders and encoders may round differently."""
Generate = Callable[[], Any]
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], float]
"""Of what two calls returned: pictures as [height, width, channels] of bytes, or whatever tensors they were."""


@dataclass(frozen=True)
class Progress:
    """Where learning is."""

    text: str
    generations: float
    """Made so far: a generation that computes 8 of 20 steps counts as 0.4."""
    planned: float
    """Before the time for tries begins."""


@dataclass
class Learning:
    """One learning.

    Args:
        skippers: of the denoisers of one pipeline.
        generations: each makes the same generation whenever it is called.
        wanted: what says how many steps are computed: one for every number to learn.
        seconds: for tries of whole generations, after the closed form. 0: none.
        distance: of what two calls returned.
        store: keeps what was found.
        on_progress: is told where learning is.
    """

    skippers: Sequence[Skipper]
    generations: Sequence[Generate]
    wanted: Sequence[BySteps]
    seconds: float = 0.0
    distance: Distance | None = None
    store: Store = field(default_factory=NoStore)
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if len(self.generations) < FEWEST:
            raise UsageError(
                f"{len(self.generations)} generations are too few to learn from: give at least {FEWEST}. The last is "
                "not learned from; it checks what was learned."
            )
        self.checks = max(1, len(self.generations) // CHECKED)
        self._made = 0.0
        self._planned = float(len(self.generations))

    def run(self) -> tuple[Learned, list[LearnedSteps]]:
        """Learn. Returns what was learned, and what was refused because it is not closer on the last generation."""
        before = [(skipper.by_steps, skipper.recorder, skipper.session.enabled) for skipper in self.skippers]
        try:
            return self._run()
        finally:
            for skipper, (by_steps, recorder, enabled) in zip(self.skippers, before, strict=True):
                skipper.by_steps, skipper.recorder, skipper.session.enabled = by_steps, recorder, enabled
                skipper.forget()

    def _run(self) -> tuple[Learned, list[LearnedSteps]]:
        self.teachers, self.about = self._teachers()
        first = self.teachers[0]
        lists = lists_of(self.wanted, first.num_steps, first.required, self.about.levels)
        self._planned += self.checks * sum(2 * count / first.num_steps for count in lists)
        self.fit = Fit(self.teachers[: -self.checks], self.about.prior)
        closed = {count: Found(computed, self.fit.weights(computed)) for count, computed in lists.items()}
        found = self._search(closed) if self.seconds > 0 else dict(closed)
        kept: list[LearnedSteps] = []
        refused: list[LearnedSteps] = []
        for count, computed in lists.items():
            own = [found[count]] if found[count] is closed[count] else [found[count], closed[count]]
            checked = self._check(own, Skip(computed=computed))
            assert checked.distance is not None
            assert checked.distance_before is not None
            (kept if checked.distance < checked.distance_before else refused).append(checked)
        return self.about.learned(kept), refused

    def _teachers(self) -> tuple[list[Trajectory], About]:
        """All generations, with every step computed."""
        found, about = [], None
        for index, generate in enumerate(self.generations):
            self._tell(f"recording generation {index + 1} of {len(self.generations)}, with every step computed")
            kept = self.store.read(f"whole-{index}")
            if kept is None:
                trajectory = self._record(generate, wants_all=True)
                about = About.of(self.skippers, trajectory)
                # raises before the others are made
                lists_of(self.wanted, trajectory.num_steps, trajectory.required, about.levels)
                self.store.write(f"whole-{index}", trajectory.to_dict())
                self.store.write("about", about.to_dict())
            else:
                trajectory = Trajectory(**kept)
            self._made += 1
            found.append(trajectory)
            if trajectory.kind != found[0].kind:
                raise UsageError(
                    f"generations differ: {found[0].num_steps} steps of {found[0].passes} passes, and "
                    f"{trajectory.num_steps} of {trajectory.passes}. Learn from generations of one kind."
                )
        about = about or About.from_dict(self.store.read("about"))
        return found, about

    def _measure(self, index: int, skip: Skip, weights: Mapping[int, tuple[Weights, ...]] | None) -> Trajectory:
        teacher = self.teachers[index]
        if weights is not None:
            assert isinstance(skip.computed, tuple)
            learned = self.about.learned([LearnedSteps(computed=skip.computed, weights=weights)])
            skip = Skip(computed=skip.computed, learned=learned)
        for skipper in self.skippers:
            skipper.by_steps = Always(skip)
            skipper.forget()
        trajectory = self._record(self.generations[index], wants_all=False)
        self._made += skip.count(teacher.num_steps) / teacher.num_steps
        pairs = zip(
            [teacher.samples[0], *teacher.outputs[0]], [trajectory.samples[0], *trajectory.outputs[0]], strict=True
        )
        if not all(map(_are_near, *zip(*pairs, strict=True))):
            raise UsageError(
                f"generation {index + 1} begins with other noise when it is made again, or its first step is another, "
                "so that nothing can be compared: pass a generator with a seed in every call, and begin anew if the "
                "model was changed."
            )
        return trajectory

    def _record(self, generate: Generate, *, wants_all: bool) -> Trajectory:
        recorder = Recorder(wants_all=wants_all)
        for skipper in self.skippers:
            skipper.recorder, skipper.session.enabled = recorder, True
        try:
            with torch.no_grad():
                returned = generate()
        finally:
            for skipper in self.skippers:
                skipper.recorder = None
        if recorder.current is None:
            raise UsageError("a generation to learn from did not call the denoiser: call the pipeline in it.")
        recorder.current.finish(returned)
        return recorder.current

    def _distance(self, index: int, student: Trajectory) -> float:
        """From the whole generation."""
        teacher = self.teachers[index]
        if self.distance is not None:
            return self.distance(teacher.returned, student.returned)
        pairs = zip(teacher.returned, student.returned, strict=True) if teacher.returned else ()
        differences = [(_values(one) - _values(other)).square().mean() for one, other in pairs]
        if not differences:  # nothing that can be compared was returned: the last sample is
            last = teacher.num_steps - 1
            differences = [(teacher.samples[last] - student.samples[last]).double().square().mean()]
        return float(torch.stack(differences).mean().sqrt())

    def _search(self, closed: Mapping[int, Found]) -> dict[int, Found]:
        """Try other weights and other steps until the time is over, each number of computed steps in its turn."""
        end = monotonic() + self.seconds
        found = {count: self._resumed(count, first) for count, first in closed.items()}
        proposals = Proposals(self.fit, self.teachers[0].required)
        tries = {count: proposals.near(partial(found.__getitem__, count)) for count in found}
        while tries and monotonic() < end:
            for count in list(tries):
                if monotonic() >= end:
                    break
                candidate = next(tries[count], None)
                if candidate is None:
                    del tries[count]
                    continue
                best = found[count]
                if self._run_all(candidate, best, end) and candidate.distance < best.distance:
                    found[count] = candidate
                    self.store.write(f"best-{count}", {"computed": candidate.computed, "weights": _plain(candidate)})
        return found

    def _resumed(self, count: int, first: Found) -> Found:
        kept = self.store.read(f"best-{count}")
        if kept is None:
            return first
        steps = LearnedSteps(computed=kept["computed"], weights=kept["weights"])
        return Found(steps.computed, dict(steps.weights))

    def _run_all(self, candidate: Found, best: Found, end: float) -> bool:
        """Make all generations that are learned from. False if it was not continued."""
        skip = Skip(computed=candidate.computed)
        for index in range(len(self.teachers) - self.checks):
            if monotonic() >= end and candidate is not best:
                return False
            self._tell(f"trying {len(candidate.computed)} computed steps: {', '.join(map(str, candidate.computed))}")
            student = self._measure(index, skip, candidate.weights)
            candidate.students.append(student)
            candidate.distances.append(self._distance(index, student))
            student.returned = []  # pictures are large
            so_far = best.distances[: index + 1]
            if candidate is not best and _mean(candidate.distances) > HOPELESS * _mean(so_far):
                return False
        candidate.distance = _mean(candidate.distances)
        return True

    def _check(self, candidates: Sequence[Found], skip: Skip) -> LearnedSteps:
        """The first that is closer than with nothing learned; or else the last."""
        self._tell(f"checking {len(candidates[0].computed)} computed steps")
        last = range(len(self.teachers) - self.checks, len(self.teachers))

        def distance(skip: Skip, weights: Mapping[int, tuple[Weights, ...]] | None) -> float:
            return _mean([self._distance(index, self._measure(index, skip, weights)) for index in last])

        before = distance(skip, None)
        for each in candidates:
            now = distance(Skip(computed=each.computed), each.weights)
            checked = LearnedSteps(computed=each.computed, weights=each.weights, distance=now, distance_before=before)
            if now < before:
                break
        return checked

    def _tell(self, text: str) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(text, self._made, self._planned))


def _mean(distances: Sequence[float]) -> float:
    """The geometric mean: one picture that changes what it shows does not decide alone."""
    return math.exp(sum(math.log(max(each, LEAST)) for each in distances) / len(distances))


def _values(tensor: Tensor) -> Tensor:
    """Of pictures from 0 to 1."""
    return tensor.double() / 255 if tensor.dtype == torch.uint8 else tensor.double()


def _are_near(one: Tensor, other: Tensor) -> bool:
    """Whether a generation that is made again begins like the first time."""
    return one.shape == other.shape and float((one - other).norm()) <= REPEATED * float(one.norm())


def _plain(found: Found) -> dict[int, list[dict[str, Any]]]:
    return {step: [vars(each) for each in passes] for step, passes in found.weights.items()}
