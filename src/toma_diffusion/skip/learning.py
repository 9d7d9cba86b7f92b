"""Learns, on a user's own model, which steps to compute and how to predict the others.

Some generations are made whole and recorded. From all but the last of them weights are fitted in closed form. With time
left, whole generations are made with other weights, with corrections of computed steps and with other lists of steps,
and what is closer to the recorded ones is kept. At the end the last generations, which nothing was learned from, say
whether it is closer there than with nothing learned. If not, it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from toma_diffusion.engine.clock import Tick
from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import Always, BySteps, Skip
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.fitting import SHRINK, Fit, Places
from toma_diffusion.skip.history import Seen
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights
from toma_diffusion.skip.levels import Levels
from toma_diffusion.skip.prior import predicted
from toma_diffusion.skip.recording import Recorder, Trajectory
from toma_diffusion.skip.schedule import computed_steps
from toma_diffusion.skip.store import NoStore, Store

FEWEST = 3
"""Generations to learn from: two to fit weights on, and one to check them."""
CHECKED = 4
"""Of so many generations one is not learned from, and checks."""
GROWTHS = (1.0, 4.0, 16.0)
"""How much more an error at the end may count than one at the beginning: guesses for lists of steps."""
STRENGTHS = (SHRINK, 10 * SHRINK, 100 * SHRINK)
"""How strongly weights may be kept to those that are not learned."""
STRENGTHS_OF_CORRECTIONS = (0.5, 0.1)
HOPELESS = 1.3
"""A try that is so many times farther on its first generations is not continued."""
LEAST = 1e-30
"""The least distance: it has a logarithm."""
REPEATED = 0.01
"""A generation that is made again may differ by so much, relatively: decoders and encoders may round differently."""
MOST_STEPS = 150
"""With more, lists of steps are only changed, not proposed: that takes minutes then."""

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
        self._places: Places | None = None

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
        lists = lists_of(self.wanted, first, self.about.levels)
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
                about = About.of(self.skippers, trajectory)
                lists_of(self.wanted, trajectory, about.levels)  # raises before the others are made
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
        """One generation with skipped steps."""
        teacher = self.teachers[index]
        for skipper in self.skippers:
            skipper.by_steps = Always(skip)
            skipper.forget()
        if weights is not None:
            assert isinstance(skip.computed, tuple)
            learned = self.about.learned([LearnedSteps(computed=skip.computed, weights=weights)])
            for skipper in self.skippers:
                skipper.by_steps = Always(Skip(computed=skip.computed, learned=learned))
        with self._recording(wants_all=False) as recorder:
            trajectory = self._generate(self.generations[index], recorder)
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

    @contextmanager
    def _recording(self, *, wants_all: bool) -> Iterator[Recorder]:
        recorder = Recorder(wants_all=wants_all)
        for skipper in self.skippers:
            skipper.recorder, skipper.session.enabled = recorder, True
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
            return self.distance(teacher.returned, student.returned)
        pairs = zip(teacher.returned, student.returned, strict=True) if teacher.returned else ()
        differences = [(_values(one) - _values(other)).square().mean() for one, other in pairs]
        if not differences:  # nothing that can be compared was returned: the last sample is
            last = teacher.num_steps - 1
            differences = [(teacher.samples[last] - student.samples[last]).double().square().mean()]
        return float(torch.stack(differences).mean().sqrt())

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
        lists = self._proposed(count)
        best = None
        while best is not found[count]:
            best = found[count]
            for candidate in self._near(best, lists, tried):
                yield candidate
                if found[count] is not best:
                    break

    def _proposed(self, count: int) -> list[tuple[int, ...]]:
        """Lists of steps with small errors."""
        if self.fit.num_steps > MOST_STEPS:
            return []
        if self._places is None:
            self._places = Places(self.fit)
        required = self.teachers[0].required
        return [with_required(self._places.best(count, growth), required) for growth in GROWTHS]

    def _near(self, best: Found, lists: Sequence[tuple[int, ...]], tried: set[tuple[int, ...]]) -> Iterator[Found]:
        """Other weights for the same steps, fitted to generations that really skipped them; then other steps."""
        predicted = {step: each for step, each in best.weights.items() if step not in best.computed}
        students = self.fit.with_students(best.students)
        for strength in STRENGTHS_OF_CORRECTIONS:
            yield Found(best.computed, predicted | self.fit.corrections(best.computed, students, strength))
        for strength in STRENGTHS:
            yield Found(best.computed, self.fit.weights(best.computed, students, strength))
        for computed in [*lists, *_moved(best.computed, self.fit.num_steps, self.teachers[0].required)]:
            if computed not in tried:
                tried.add(computed)
                yield Found(computed, self.fit.weights(computed))

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


@dataclass(frozen=True)
class About:
    """What generations have in common."""

    model_class: str
    num_steps: int
    passes: int
    levels: Levels | None
    scheduler: str
    guidance: float | None

    @classmethod
    def of(cls, skippers: Sequence[Skipper], trajectory: Trajectory) -> About:
        """As the last generation noted it."""
        generation = max((skipper.generation for skipper in skippers), key=lambda each: each.number)
        name = type(skippers[0].model).__name__
        return cls(name, *trajectory.kind, generation.levels, generation.scheduler, generation.guidance)

    def prior(self, history: Sequence[int], step: int) -> Weights:
        """The weights of a skipped step with nothing learned."""
        return predicted(self.levels, history, step)

    def learned(self, steps: Sequence[LearnedSteps]) -> Learned:
        """For such generations."""
        return Learned(
            model_class=self.model_class,
            num_steps=self.num_steps,
            passes=self.passes,
            scheduler=self.scheduler,
            guidance=self.guidance,
            angles=() if self.levels is None else self.levels.angles,
            steps=tuple(steps),
        )

    def to_dict(self) -> dict[str, Any]:
        """In plain values."""
        return vars(self) | {"levels": None if self.levels is None else dict(vars(self.levels))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> About:
        """The inverse of `to_dict`."""
        levels = values["levels"]
        return cls(**{**values, "levels": None if levels is None else Levels(**levels)})


class NextGenerations(Recorder):
    """Learns from the next generations while they are used: they run whole, and the closed form follows.

    It never raises: what stands in the way is told.

    Args:
        skippers: of the denoisers of one pipeline.
        count: how many generations.
        wanted: what says how many steps are computed: one for every number to learn.
        when_done: gets what was learned, or why nothing was.
    """

    def __init__(
        self,
        skippers: Sequence[Skipper],
        count: int,
        wanted: Sequence[BySteps],
        when_done: Callable[[Learned | None, str], None],
    ) -> None:
        super().__init__(wants_all=True)
        self.skippers, self.count, self.wanted, self.when_done = skippers, count, wanted, when_done
        self.recorded: list[Trajectory] = []
        self._ignored: int | None = None
        """The generation that was in progress when it began."""

    def note(self, model: nn.Module, tick: Tick, seen: Seen, output: Any) -> None:
        """A call of the denoiser. After the last one of the last generation, learn."""
        if tick.generation == self._ignored:
            return
        begins = self.current is None or tick.generation != self._generation
        if begins and tick.step != 0:
            self._ignored = tick.generation
            return
        if begins and self.current is not None and (not self.recorded or self.recorded[-1] is not self.current):
            self._end(None, "a generation was interrupted, or its guidance begins or ends half-way")
            return
        try:
            super().note(model, tick, seen, output)
            current = self.current
            if current is None or not current.is_whole:
                return
            current.finish()
            if self.recorded and current.kind != self.recorded[0].kind:
                self.recorded.clear()  # another kind of generation: count anew
            self.recorded.append(current)
            if len(self.recorded) == self.count:
                self._end(*self._learn())
        except UsageError as error:
            self._end(None, str(error))

    def _learn(self) -> tuple[Learned | None, str]:
        *lessons, last = self.recorded
        about = About.of(self.skippers, last)
        fit, check = Fit(lessons, about.prior), Fit([last], about.prior)
        kept, refused = [], []
        for count, computed in lists_of(self.wanted, last, about.levels).items():
            weights = fit.weights(computed)
            if check.error(computed, weights) < check.error(computed, None):
                kept.append(LearnedSteps(computed=computed, weights=weights))
            else:
                refused.append(str(count))
        why = f"it is no closer with {', '.join(refused)} computed steps" if refused else ""
        return about.learned(kept) if kept else None, why

    def _end(self, learned: Learned | None, why: str) -> None:
        for skipper in self.skippers:
            skipper.recorder = None
        self.when_done(learned, why)


def lists_of(wanted: Sequence[BySteps], whole: Trajectory, levels: Levels | None) -> dict[int, tuple[int, ...]]:
    """The steps to begin with, by their number, most first.

    Args:
        wanted: what says how many steps are computed, or which.
        whole: a generation of the kind that is learned from.
        levels: its noise levels.
    """
    found: dict[int, tuple[int, ...]] = {}
    num_steps = whole.num_steps
    skips = [skip for by_steps in wanted if (skip := by_steps(num_steps)) is not None]
    for skip in sorted(skips, key=lambda each: isinstance(each.computed, tuple)):  # lists of one's own count most
        if (count := skip.count(num_steps)) < num_steps:
            computed = computed_steps(replace(skip, learned=None), num_steps, levels)
            found[count] = with_required(computed, whole.required)
    if not found:
        raise UsageError(
            f"all {num_steps} steps would be computed: there is nothing to learn. Learn with more steps, or say how "
            "many are computed."
        )
    return dict(sorted(found.items(), reverse=True))


def with_required(computed: tuple[int, ...], required: Sequence[int]) -> tuple[int, ...]:
    """The same number of steps, with the first step of every denoiser among them."""
    for step in required:
        if step not in computed:
            free = [each for each in computed if each not in required and each != 0]
            if not free:
                raise UsageError(
                    f"{len(computed)} computed steps are too few: each of the {len(required)} denoisers computes its "
                    "first."
                )
            nearest = min(free, key=lambda each: abs(each - step))
            computed = tuple(sorted({*computed, step} - {nearest}))
    return computed


def _mean(distances: Sequence[float]) -> float:
    """The geometric mean: one picture that changes what it shows does not decide alone."""
    return math.exp(sum(math.log(max(each, LEAST)) for each in distances) / len(distances))


def _values(tensor: Tensor) -> Tensor:
    """Of pictures from 0 to 1."""
    return tensor.double() / 255 if tensor.dtype == torch.uint8 else tensor.double()


def _are_near(one: Tensor, other: Tensor) -> bool:
    """Whether a generation that is made again begins like the first time."""
    return one.shape == other.shape and float((one - other).norm()) <= REPEATED * float(one.norm())


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
