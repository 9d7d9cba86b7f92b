"""Fewer steps, the plainest way to save time: as the scheduler spaces them, or some of the pipeline's own timesteps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from toma_diffusion.checks import check_integer, check_sequence, listed
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut, at_least, written
from toma_lab.columns.thinned import KNOWN, thinned


class FewerSteps(Shortcut):
    """The same model, scheduler and noise, in fewer steps."""

    name = knob = "steps"
    checks = {"steps": at_least(1)}  # noqa: RUF012
    is_cache = False

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FewerSteps:
        if not settings:
            raise UsageError("method 'steps' does not say how many: write steps:14.")
        return super().from_settings(settings)

    @property
    def steps(self) -> int:
        """How many are taken."""
        return int(self.value("steps"))

    @property
    def text(self) -> str:
        return f"{self.name}:{self.steps}"

    @property
    def title(self) -> str:
        return f"{self.steps} steps"

    @property
    def line(self) -> tuple[str, str]:
        return "fewer steps", ""

    def steps_of(self, steps: int) -> int:
        if self.steps >= steps:
            raise UsageError(
                f"{self.text!r} is not fewer than the {steps} steps of the run: give fewer, or a run of more."
            )
        return self.steps

    def sentence(self, steps: int) -> str:
        return f"{self.steps} steps are taken in place of {steps}."

    def applied(self, pipe: Any, steps: int) -> AbstractContextManager[object]:
        """Nothing to do: the pipeline is asked for fewer."""
        return nullcontext()


def check_computed(name: str, value: Any) -> tuple[int, ...]:
    """The steps in order, the first of the run among them."""
    steps = check_sequence(name, value, "the computed steps, counted from 0, such as (0,1,2,4,7)")
    steps = tuple(check_integer(name, step, minimum=0) for step in steps)
    if steps != tuple(sorted(set(steps))):
        raise UsageError(f"{name}={written(steps)} is not allowed: write each step once, from the first to the last.")
    if not steps or steps[0] != 0:
        raise UsageError(f"{name}={written(steps)} lacks step 0: every generation begins with it. Add it.")
    return steps


class Timesteps(Shortcut):
    """The same model, scheduler, noise and timesteps, of which only some are computed."""

    name = "timesteps"
    knob = "computed"
    checks = {"computed": check_computed}  # noqa: RUF012
    is_cache = False
    needs_pipeline = True

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Timesteps:
        if not settings:
            raise UsageError("method 'timesteps' does not say which: write timesteps:computed=(0,1,2,4,7).")
        return super().from_settings(settings)

    @property
    def computed(self) -> tuple[int, ...]:
        """The steps that are taken."""
        return tuple(self.value("computed"))

    @property
    def title(self) -> str:
        return f"{self.name} {written(self.computed)}"

    @property
    def line(self) -> tuple[str, str]:
        return "some of the own timesteps", ""

    @property
    def point(self) -> str:
        return str(len(self.computed))

    def steps_of(self, steps: int) -> int:
        check_within(self.text, self.computed, steps)
        return len(self.computed)

    def requested_steps(self, steps: int) -> int:
        return steps

    def sentence(self, steps: int) -> str:
        computed = ", ".join(map(str, self.computed))
        return f"Of the {steps} steps these are computed: {computed}. The solver takes larger steps between them."

    def check_pipeline(self, pipe: Any) -> None:
        name = type(getattr(pipe, "scheduler", None)).__name__
        if name not in KNOWN:
            raise UsageError(
                f"{self.text!r} cannot be used with a {name}, the scheduler of this {type(pipe).__name__}: "
                f"{listed(KNOWN)}, or leave it out."
            )

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        self.check_pipeline(pipe)
        with scheduler_replaced(pipe, thinned(pipe.scheduler, self.computed)):
            yield


def check_within(text: str, computed: tuple[int, ...], steps: int) -> None:
    """Raise if one of the steps is beyond the run, or if they are all that it has."""
    if computed[-1] >= steps:
        raise UsageError(
            f"{text!r} has step {computed[-1]}, and the steps of this run are 0 to {steps - 1}: leave it out, or take "
            "more steps."
        )
    if len(computed) == steps:
        raise UsageError(f"{text!r} has all {steps} steps of the run: leave some out.")


@contextmanager
def scheduler_replaced(pipe: Any, scheduler: Any) -> Iterator[None]:
    """Another scheduler in the pipeline for the duration of a `with` block."""
    own = pipe.scheduler
    pipe.scheduler = scheduler
    try:
        yield
    finally:
        pipe.scheduler = own
