"""What is settled when a generation begins (which steps are computed, and how the others are predicted), and what is
decided step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from toma_diffusion.engine.clock import Running, StepCounter, Tick, steps_unknown
from toma_diffusion.errors import UsageError
from toma_diffusion.skip import prior
from toma_diffusion.skip.config import BySteps, Skip
from toma_diffusion.skip.learned import LEARN_AGAIN, LearnedSteps, Weights
from toma_diffusion.skip.levels import Levels, read_levels
from toma_diffusion.skip.schedule import computed_steps


@dataclass(frozen=True)
class Generation:
    """One generation. As it is made, nothing is known of it: every step is computed."""

    number: int = 0
    num_steps: int | None = None
    levels: Levels | None = None
    computed: tuple[int, ...] | None = None
    """The steps that are computed; None: all."""
    learned: LearnedSteps | None = None
    """How the others are predicted, if it was learned."""
    scheduler: str = ""
    """The name of its class, if it is known."""
    guidance: float | None = None
    skip: Skip | None = None
    """The settings."""

    @classmethod
    def begin(
        cls,
        model: nn.Module,
        tick: Tick,
        steps: StepCounter,
        running: Running | None,
        by_steps: BySteps,
        *,
        teaches: bool,
    ) -> Generation:
        """Settle it at its first call. If it `teaches`, it is learned from: every step is computed."""
        scheduler, name = steps.scheduler, type(model).__name__
        num_steps = tick.num_steps
        skip = by_steps(num_steps)
        if skip is not None and num_steps is None and not isinstance(skip.computed, tuple):
            raise steps_unknown(f"computed={skip.computed} needs", "say which steps are computed")
        eta = 0.0 if running is None else float(running.variables.get("eta") or 0.0)
        levels = None
        if scheduler is not None and num_steps is not None:
            levels = read_levels(scheduler, steps.first, num_steps, eta, name)
        of_scheduler = "" if scheduler is None else type(scheduler).__name__
        guidance = None if running is None else running.guidance
        begun = cls(tick.generation, num_steps, levels, scheduler=of_scheduler, guidance=guidance, skip=skip)
        return begun if skip is None or teaches else begun._skipping(skip, name)

    def _skipping(self, skip: Skip, model_class: str) -> Generation:
        num_steps, learned = self.num_steps, None
        if skip.learned is not None:
            angles = () if self.levels is None else self.levels.angles
            skip.learned.check(model_class, num_steps, self.scheduler, self.guidance, angles)
            learned = skip.learned.of(skip.count(skip.learned.num_steps))
        if num_steps is None:
            assert isinstance(skip.computed, tuple)
            return replace(self, computed=skip.computed, learned=learned)
        computed = computed_steps(skip, num_steps, self.levels)
        return replace(self, computed=None if len(computed) == num_steps else computed, learned=learned)

    def computes(self, step: int) -> bool:
        beyond = self.num_steps is not None and step >= self.num_steps
        return self.computed is None or beyond or step in self.computed

    @property
    def needs(self) -> tuple[int, bool]:
        """How many outputs of a pass must be kept, and whether the sample of the last computed step."""
        depth, sample = prior.needs(self.levels)
        if self.learned is not None:
            return max(depth, self.learned.depth), sample or self.learned.needs_last_sample
        return depth, sample

    def weights(self, tick: Tick, kept: tuple[int, ...]) -> Sequence[Weights]:
        """Those of a skipped step: for each of the passes that make up the batch, or of all of them.

        `kept` are the last computed steps, the latest first.
        """
        learned = self.learned_weights(tick, kept)
        return [prior.predicted(self.levels, kept, tick.step)] if learned is None else learned

    def learned_weights(self, tick: Tick, kept: tuple[int, ...]) -> Sequence[Weights] | None:
        """None if none were learned for this step, or if other steps than planned were computed before."""
        learned = self.learned
        if learned is None or tick.step not in learned.weights:
            return None
        first = tick.pass_index * tick.parts
        weights = learned.weights[tick.step][first : first + tick.parts]
        depth = max((len(each.outputs) for each in weights), default=0)
        expected = tuple(each for each in reversed(learned.computed) if each <= tick.step)[:depth]
        return weights if len(weights) == tick.parts and kept[:depth] == expected else None

    def check_passes(self, count: int) -> None:
        """Raise `UsageError` if weights were learned for another number of passes over a step. 0: not known yet."""
        learned = None if self.skip is None or self.learned is None else self.skip.learned
        if learned is not None and learned.passes and count and count != learned.passes:
            raise UsageError(
                f"the weights of skipped steps were learned for {learned.passes} passes over a step, and this "
                f"generation has {count}: guide it as it was learned, or {LEARN_AGAIN}."
            )


@dataclass(eq=False)
class Decisions:
    """What was decided in one generation so far."""

    step: int = -1
    """The step in progress."""
    runs: bool = True
    """Whether the denoiser runs in the passes over it that are still to come."""
    must_run_next: bool = False
    """Whether it runs in the next step, whatever the plan: a pass over this one had nothing to be predicted from."""
    _computed: set[int] = field(default_factory=set)
    _predicted: set[int] = field(default_factory=set)

    @property
    def computed(self) -> tuple[int, ...]:
        """The steps in which no pass was predicted."""
        return tuple(sorted(self._computed - self._predicted))

    @property
    def counts(self) -> tuple[int, int]:
        """How many steps were computed, and in how many a pass was predicted."""
        return len(self._computed - self._predicted), len(self._predicted)

    def begin_step(self, step: int, *, is_planned: bool) -> None:
        """A call belongs to this step. `is_planned` says whether the plan is to run the denoiser in it."""
        if step != self.step:
            self.step, self.runs, self.must_run_next = step, self.must_run_next or is_planned, False

    def run_without_history(self) -> None:
        """A pass has nothing to be predicted from: run. If an earlier pass was predicted already, run next time too."""
        self.runs, self.must_run_next = True, self.step in self._predicted

    def run_again(self, step: int) -> None:
        """Run in all passes over this step that are still to come, also if it was predicted already."""
        if step == self.step:
            self.runs, self.must_run_next = True, False
            self._predicted.discard(step)
        else:
            self.must_run_next = True

    def note(self, step: int, *, predicted: bool) -> None:
        """A pass over this step was predicted, or computed."""
        (self._predicted if predicted else self._computed).add(step)
