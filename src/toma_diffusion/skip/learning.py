"""Learns, on a user's own model, which steps to compute and how to predict the others.

Some generations are made whole and recorded. From all but the last of them weights are fitted in closed form. With time
left, whole generations are made with other weights, with corrections of computed steps and with other lists of steps,
and what is closer to the recorded ones is kept. At the end the last generation, which nothing was learned from, says
whether it is closer there than with nothing learned. If not, it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.config import Learned, LearnedSteps, Skip, Weights
from toma_diffusion.errors import UsageError
from toma_diffusion.skip import prior
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.fitting import SHRINK, Fit, Places
from toma_diffusion.skip.levels import Levels
from toma_diffusion.skip.recording import Recorder, Trajectory
from toma_diffusion.skip.schedule import computed_steps
from toma_diffusion.skip.store import NoStore, Store

FEWEST = 3
"""Generations to learn from: two to fit weights on, and one to check them."""
GROWTHS = (1.0, 4.0, 16.0)
"""How much more an error at the end may count than one at the beginning: guesses for lists of steps."""
STRENGTHS = (SHRINK, 10 * SHRINK, 100 * SHRINK)
"""How strongly weights may be kept to those that are not learned."""
STRENGTHS_OF_CORRECTIONS = (0.5, 0.1)
HOPELESS = 1.3
"""A try that is so many times farther on its first generations is not continued."""
SAME = 1e-6
"""Distances are told apart above this."""

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
class Found:
    """The best of one number of computed steps so far."""

    computed: tuple[int, ...]
    weights: dict[int, tuple[Weights, ...]]
    distance: float = math.inf
    """The geometric mean over the generations that are learned from."""
    distances: list[float] = field(default_factory=list)
    students: list[Trajectory] = field(default_factory=list)


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
    wanted: Sequence[Skip]
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
        self._made = 0.0
        self._planned = float(len(self.generations))

    def run(self) -> tuple[Learned, list[LearnedSteps]]:
        """Learn. Returns what was learned, and what was refused because it is not closer on the last generation."""
        before = [(skipper.skip, skipper.recorder, skipper.state.enabled) for skipper in self.skippers]
        try:
            return self._run()
        finally:
            for skipper, (skip, recorder, enabled) in zip(self.skippers, before, strict=True):
                skipper.skip, skipper.recorder, skipper.state.enabled = skip, recorder, enabled
                skipper.forget()

    def _run(self) -> tuple[Learned, list[LearnedSteps]]:
        teachers, about = self._teachers()
        self.teachers, self.about = teachers, about
        levels, num_steps = about.levels, teachers[0].num_steps
        counts = counts_of(self.wanted, num_steps)
        self._planned += sum(2 * count / num_steps for count in counts)

        def weights_of(history: Sequence[int], step: int) -> Weights:
            return prior.predicted(levels, history, step)

        self.fit = Fit(teachers[:-1], weights_of)
        lists = {
            count: self._with_required(computed_steps(Skip(computed=count), num_steps, levels)) for count in counts
        }
        closed = {count: Found(computed, self.fit.weights(computed)) for count, computed in lists.items()}
        found = dict(closed)
        if self.seconds > 0:
            found = self._search(closed)
        kept: list[LearnedSteps] = []
        refused: list[LearnedSteps] = []
        for count in counts:
            own = [found[count]] if found[count].computed == closed[count].computed else [found[count], closed[count]]
            checked = self._check(own, Skip(computed=lists[count]))
            (kept if self._is_better(checked) else refused).append(checked)
        return self._learned(kept), refused

    def _learned(self, steps: Sequence[LearnedSteps]) -> Learned:
        about = self.about
        return Learned(
            model_class=type(self.skippers[0].model).__name__,
            num_steps=self.teachers[0].num_steps,
            scheduler=about.scheduler,
            guidance=about.guidance,
            angles=() if about.levels is None else about.levels.angles,
            steps=tuple(steps),
        )

    @staticmethod
    def _is_better(steps: LearnedSteps) -> bool:
        assert steps.distance is not None
        assert steps.distance_before is not None
        return steps.distance < steps.distance_before

    def _with_required(self, computed: tuple[int, ...]) -> tuple[int, ...]:
        """The same with the first step of every denoiser in the place of the nearest."""
        for step in self.teachers[0].required:
            if step not in computed:
                nearest = min(computed[1:], key=lambda each: abs(each - step))
                computed = tuple(sorted({*computed, step} - {nearest}))
        return computed

    # Whole generations.

    def _teachers(self) -> tuple[list[Trajectory], About]:
        """All generations, with every step computed."""
        found, about = [], None
        for index, generate in enumerate(self.generations):
            self._tell(f"recording generation {index + 1} of {len(self.generations)}, with every step computed")
            kept = self.store.read(f"whole-{index}")
            if kept is None:
                with self._recording(wants_all=True) as recorder:
                    trajectory = self._generate(generate, recorder)
                about = About.of(self.skippers)
                self.store.write(f"whole-{index}", trajectory.to_dict())
                self.store.write("about", about.to_dict())
            else:
                trajectory = Trajectory(**kept)
            self._made += 1
            found.append(trajectory)
            if (trajectory.num_steps, trajectory.passes) != (found[0].num_steps, found[0].passes):
                raise UsageError(
                    f"generations differ: {found[0].num_steps} steps of {found[0].passes} passes, and "
                    f"{trajectory.num_steps} of {trajectory.passes}. Learn from generations of one kind."
                )
        about = about or About.from_dict(self.store.read("about"))
        return found, about

    def _measure(self, index: int, skip: Skip, weights: Mapping[int, tuple[Weights, ...]] | None) -> Trajectory:
        """One generation with skipped steps."""
        teacher = self.teachers[index]
        for skipper in self.skippers:
            skipper.skip = skip
            skipper.forget()
        if weights is not None:
            assert isinstance(skip.computed, tuple)
            one = LearnedSteps(computed=skip.computed, weights=weights)
            for skipper in self.skippers:
                skipper.skip = Skip(computed=skip.computed, learned=self._learned([one]))
        with self._recording(wants_all=False) as recorder:
            trajectory = self._generate(self.generations[index], recorder)
        self._made += skip.count(teacher.num_steps) / teacher.num_steps
        if not torch.equal(trajectory.samples[0], teacher.samples[0]):
            raise UsageError(
                f"generation {index + 1} begins with other noise when it is made again, so that nothing can be "
                "compared: pass a generator with a seed in every call."
            )
        return trajectory

    @contextmanager
    def _recording(self, *, wants_all: bool) -> Iterator[Recorder]:
        recorder = Recorder(wants_all=wants_all)
        for skipper in self.skippers:
            skipper.recorder, skipper.state.enabled = recorder, True
        try:
            yield recorder
        finally:
            for skipper in self.skippers:
                skipper.recorder = None

    @staticmethod
    def _generate(generate: Generate, recorder: Recorder) -> Trajectory:
        with torch.no_grad():
            returned = generate()
        if recorder.current is None:
            raise UsageError("a generation to learn from did not call the denoiser: call the pipeline in it.")
        recorder.current.finish(returned)
        return recorder.current

    def _distance(self, index: int, student: Trajectory) -> float:
        """From the whole generation."""
        teacher = self.teachers[index]
        if self.distance is not None:
            return max(self.distance(teacher.returned, student.returned), SAME)
        pairs = zip(teacher.returned, student.returned, strict=True) if teacher.returned else ()
        differences = [(_values(one) - _values(other)).square().mean() for one, other in pairs]
        if not differences:  # nothing that can be compared was returned: the last sample is
            last = teacher.num_steps - 1
            differences = [(teacher.samples[last] - student.samples[last]).double().square().mean()]
        return max(float(torch.stack(differences).mean().sqrt()), SAME)

    # The closed loop.

    def _search(self, closed: Mapping[int, Found]) -> dict[int, Found]:
        """Try other weights and other steps until the time is over, each number of computed steps in its turn."""
        end = monotonic() + self.seconds
        found = {count: self._resumed(count, first) for count, first in closed.items()}
        tries = {count: self._tries(count, found) for count in found}
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

    def _tries(self, count: int, found: Mapping[int, Found]) -> Iterator[Found]:
        """What may be closer than the best so far, which changes while they are tried."""
        yield found[count]  # as it is: to know its distance
        tried = {found[count].computed}
        places = Places(self.fit)
        lists = [self._with_required(places.best(count, growth)) for growth in GROWTHS]
        best = None
        while best is not found[count]:
            best = found[count]
            for candidate in self._near(best, lists, tried):
                yield candidate
                if found[count] is not best:
                    break

    def _near(self, best: Found, lists: Sequence[tuple[int, ...]], tried: set[tuple[int, ...]]) -> Iterator[Found]:
        """Other weights for the same steps, fitted to generations that really skipped them; then other steps."""
        predicted = {step: each for step, each in best.weights.items() if step not in best.computed}
        for strength in STRENGTHS_OF_CORRECTIONS:
            corrections = self.fit.corrections(best.computed, best.students, strength)
            yield Found(best.computed, predicted | corrections)
        for strength in STRENGTHS:
            yield Found(best.computed, self.fit.weights(best.computed, best.students, shrink=strength))
        for computed in [*lists, *_moved(best.computed, self.fit.num_steps, self.teachers[0].required)]:
            if computed not in tried:
                tried.add(computed)
                yield Found(computed, self.fit.weights(computed))

    def _run_all(self, candidate: Found, best: Found, end: float) -> bool:
        """Make all generations that are learned from. False if it was not continued."""
        skip = Skip(computed=candidate.computed)
        for index in range(len(self.teachers) - 1):
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
        index = len(self.teachers) - 1
        self._tell(f"checking {len(candidates[0].computed)} computed steps on the last generation")
        before = self._distance(index, self._measure(index, skip, None))
        for each in candidates:
            now = self._distance(index, self._measure(index, Skip(computed=each.computed), each.weights))
            checked = LearnedSteps(computed=each.computed, weights=each.weights, distance=now, distance_before=before)
            if now < before:
                break
        return checked

    def _tell(self, text: str) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(text, self._made, self._planned))


@dataclass(frozen=True)
class About:
    """What generations have in common."""

    levels: Any
    scheduler: str
    guidance: float | None

    @classmethod
    def of(cls, skippers: Sequence[Skipper]) -> About:
        """As the last generation noted it."""
        generation = max((skipper.generation for skipper in skippers), key=lambda each: each.number)
        return cls(generation.levels, generation.scheduler, generation.guidance)

    def to_dict(self) -> dict[str, Any]:
        """In plain values."""
        return vars(self) | {"levels": None if self.levels is None else vars(self.levels)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> About:
        """The inverse of `to_dict`."""
        levels = values["levels"]
        return cls(**{**values, "levels": None if levels is None else Levels(**levels)})


class NextGenerations(Recorder):
    """Learns from the next generations while they are used: they run whole, and the closed form follows.

    Args:
        skippers: of the denoisers of one pipeline.
        count: how many generations.
        wanted: what says how many steps are computed: one for every number to learn.
        when_done: gets what was learned, and the numbers of computed steps that were refused.
    """

    def __init__(
        self,
        skippers: Sequence[Skipper],
        count: int,
        wanted: Sequence[Skip],
        when_done: Callable[[Learned, list[int]], None],
    ) -> None:
        super().__init__(wants_all=True)
        self.skippers, self.count, self.wanted, self.when_done = skippers, count, wanted, when_done
        self.recorded: list[Trajectory] = []

    def note(self, model: Any, tick: Any, seen: Any, output: Any) -> None:
        """A call of the denoiser. After the last one of the last generation, learn."""
        super().note(model, tick, seen, output)
        current = self.current
        if current is None or not current.is_whole:
            return
        current.finish()
        if self.recorded and (current.num_steps, current.passes) != (
            self.recorded[0].num_steps,
            self.recorded[0].passes,
        ):
            self.recorded.clear()  # another kind of generation: count anew
        self.recorded.append(current)
        if len(self.recorded) == self.count:
            for skipper in self.skippers:
                skipper.recorder = None
            self._learn()

    def _learn(self) -> None:
        about, (*lessons, last) = About.of(self.skippers), self.recorded
        num_steps = last.num_steps

        def weights_of(history: Sequence[int], step: int) -> Weights:
            return prior.predicted(about.levels, history, step)

        fit, check = Fit(lessons, weights_of), Fit([last], weights_of)
        kept, refused = [], []
        for count in counts_of(self.wanted, num_steps):
            computed = computed_steps(Skip(computed=count), num_steps, about.levels)
            weights = fit.weights(computed)
            before, now = check.error(computed, None), check.error(computed, weights)
            if now < before:
                kept.append(LearnedSteps(computed=computed, weights=weights, distance=now, distance_before=before))
            else:
                refused.append(count)
        model_class = type(self.skippers[0].model).__name__
        learned = Learned(
            model_class=model_class,
            num_steps=num_steps,
            scheduler=about.scheduler,
            guidance=about.guidance,
            angles=() if about.levels is None else about.levels.angles,
            steps=tuple(kept),
        )
        self.when_done(learned, refused)


def counts_of(wanted: Sequence[Skip], num_steps: int) -> list[int]:
    """How many steps are computed, most first."""
    counts = sorted({each.count(num_steps) for each in wanted} - {num_steps}, reverse=True)
    if not counts:
        raise UsageError(
            f"all {num_steps} steps would be computed: there is nothing to learn. Learn with more steps, or say how "
            "many are computed."
        )
    return counts


def _mean(distances: Sequence[float]) -> float:
    """The geometric mean: one picture that changes what it shows does not decide alone."""
    return math.exp(sum(map(math.log, distances)) / len(distances))


def _values(tensor: Tensor) -> Tensor:
    """Of pictures from 0 to 1."""
    return tensor.double() / 255 if tensor.dtype == torch.uint8 else tensor.double()


def _moved(computed: tuple[int, ...], num_steps: int, required: Sequence[int]) -> list[tuple[int, ...]]:
    """The lists in which one step is another."""
    found = []
    for place in range(1, len(computed)):
        for step in (computed[place] - 1, computed[place] + 1):
            if 0 < step < num_steps and step not in computed and computed[place] not in required:
                found.append(tuple(sorted({*computed, step} - {computed[place]})))
    return found


def _plain(found: Found) -> dict[int, list[dict[str, Any]]]:
    return {step: [vars(each) for each in passes] for step, passes in found.weights.items()}
