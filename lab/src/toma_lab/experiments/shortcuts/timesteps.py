"""Some of the pipeline's own timesteps: the same solver takes larger steps between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from toma_diffusion.checks import check_integer, check_sequence, listed
from toma_diffusion.errors import UsageError
from toma_lab.experiments.shortcuts.base import Shortcut, check_known, written
from toma_lab.experiments.shortcuts.thinned import KNOWN, thinned


@dataclass(frozen=True)
class Timesteps(Shortcut):
    """The same model, scheduler, noise and timesteps, of which only some are computed."""

    name = "timesteps"
    knob = "computed"
    is_cache = False
    needs_pipeline = True

    computed: tuple[int, ...]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Timesteps:
        """From `computed=(0,1,2,4,7)`."""
        check_known(cls.name, settings, ("computed",))
        return cls(check_computed(settings.get("computed")))

    @property
    def settings(self) -> dict[str, Any]:
        """The steps."""
        return {"computed": self.computed}

    @property
    def title(self) -> str:
        """`timesteps (0,1,2,4,7)`."""
        return f"{self.name} {written(self.computed)}"

    @property
    def family(self) -> tuple[str, str]:
        """In words."""
        return "some of the own timesteps", ""

    @property
    def point(self) -> str:
        """How many."""
        return str(len(self.computed))

    def steps_of(self, steps: int) -> int:
        """So many, if they are steps of the run and not all of them."""
        check_within(self.text, self.computed, steps)
        return len(self.computed)

    def requested_steps(self, steps: int) -> int:
        """All: the list is one of the run's own timesteps."""
        return steps

    def sentence(self, steps: int) -> str:
        """Which steps are computed, and what happens in between."""
        computed = ", ".join(map(str, self.computed))
        return f"Of the {steps} steps these are computed: {computed}. The solver takes larger steps between them."

    def check(self, model: nn.Module) -> None:
        """Any model can."""

    def check_pipeline(self, pipe: Any) -> None:
        """The pipeline needs a scheduler whose steps may be of any length."""
        check_scheduler(self.text, pipe)

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        """Give the pipeline a thinned copy of its scheduler."""
        self.check_pipeline(pipe)
        with scheduler_replaced(pipe, thinned(pipe.scheduler, self.computed)):
            yield


def check_computed(value: Any) -> tuple[int, ...]:
    """The steps in order, the first of the run among them."""
    steps = check_sequence("computed", value, "the computed steps, counted from 0, such as (0,1,2,4,7)")
    steps = tuple(check_integer("computed", step, minimum=0) for step in steps)
    if steps != tuple(sorted(set(steps))):
        raise UsageError(f"computed={written(steps)} is not allowed: write each step once, from the first to the last.")
    if not steps or steps[0] != 0:
        raise UsageError(f"computed={written(steps)} lacks step 0: every generation begins with it. Add it.")
    return steps


def check_within(text: str, computed: tuple[int, ...], steps: int) -> None:
    """Raise if one of the steps is beyond the run, or if they are all that it has."""
    if computed[-1] >= steps:
        raise UsageError(
            f"{text!r} has step {computed[-1]}, and the steps of this run are 0 to {steps - 1}: leave it out, or take "
            "more steps."
        )
    if len(computed) == steps:
        raise UsageError(f"{text!r} has all {steps} steps of the run: leave some out.")


def check_scheduler(text: str, pipe: Any) -> None:
    """Raise if the steps of a pipeline's scheduler cannot be made longer."""
    name = type(getattr(pipe, "scheduler", None)).__name__
    if name not in KNOWN:
        raise UsageError(
            f"{text!r} cannot be used with a {name}, the scheduler of this {type(pipe).__name__}: {listed(KNOWN)}, or "
            "leave it out."
        )


@contextmanager
def scheduler_replaced(pipe: Any, scheduler: Any) -> Iterator[None]:
    """Another scheduler in the pipeline for the duration of a `with` block."""
    own = pipe.scheduler
    pipe.scheduler = scheduler
    try:
        yield
    finally:
        pipe.scheduler = own
