"""Another solver of diffusers in place of the pipeline's: what a user would try first for fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from toma_diffusion.checks import check_integer, check_one_of, listed
from toma_diffusion.errors import UsageError
from toma_lab.experiments.shortcuts.base import Shortcut, check_known, written
from toma_lab.experiments.shortcuts.other_schedulers import CLASSES, other_scheduler
from toma_lab.experiments.shortcuts.thinned import thinned
from toma_lab.experiments.shortcuts.timesteps import check_computed, check_within, scheduler_replaced

SPACINGS = ("own", "karras", "ays")


@dataclass(frozen=True)
class Solver(Shortcut):
    """The same model and noise, another solver."""

    name = "solver"
    knob = "steps"
    is_cache = False
    needs_pipeline = True

    solver: str
    steps: int | None = None
    """How many the solver takes. None: as many as the run."""
    spacing: str = "own"
    """`own`: as diffusers spaces the steps of this solver. `karras`: evenly in the seventh root of the noise level.
    `ays`: Align Your Steps."""
    computed: tuple[int, ...] | None = None
    """Those of its steps that are computed. None: all."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Solver:
        """From `name=dpmpp-2m;steps=8;spacing=karras;computed=(0,1,2,4,7)`. All but the name may be left out."""
        check_known(cls.name, settings, ("name", "steps", "spacing", "computed"))
        if "name" not in settings:
            raise UsageError(f"solver needs a name, such as solver:name=dpmpp-2m;steps=8: {listed(CLASSES)}.")
        check_one_of("name", settings["name"], tuple(CLASSES))
        check_one_of("spacing", settings.get("spacing", cls.spacing), SPACINGS)
        steps, computed = settings.get("steps"), settings.get("computed")
        return cls(
            settings["name"],
            None if steps is None else check_integer("steps", steps, minimum=1),
            settings.get("spacing", cls.spacing),
            None if computed is None else check_computed(computed),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from the usual, and the name."""
        found: dict[str, Any] = {"name": self.solver, "steps": self.steps, "computed": self.computed}
        found |= {"spacing": None if self.spacing == "own" else self.spacing}
        return {name: found[name] for name in ("name", "steps", "spacing", "computed") if found[name] is not None}

    @property
    def title(self) -> str:
        """`dpmpp-2m, 8 steps, karras`."""
        steps = [] if self.steps is None else [f"{self.steps} steps"]
        computed = [] if self.computed is None else [written(self.computed)]
        return ", ".join([self.solver, *steps, *([] if self.spacing == "own" else [self.spacing]), *computed])

    @property
    def family(self) -> tuple[str, str]:
        """The solver, and how it is spaced."""
        return self.solver, "" if self.spacing == "own" else self.spacing

    @property
    def point(self) -> str:
        """How many steps are computed."""
        return str(self.steps or "") if self.computed is None else str(len(self.computed))

    def steps_of(self, steps: int) -> int:
        """Its own number; of those, the computed ones."""
        asked = self.requested_steps(steps)
        if self.computed is None:
            return asked
        check_within(self.text, self.computed, asked)
        return len(self.computed)

    def requested_steps(self, steps: int) -> int:
        """Its own number."""
        if self.steps is not None and self.steps > steps:
            raise UsageError(f"{self.text!r} has more than the {steps} steps of the run: give fewer, or a run of more.")
        return self.steps or steps

    def sentence(self, steps: int) -> str:
        """The solver, its number of steps, and their spacing."""
        asked = self.requested_steps(steps)
        spaced = {"own": "", "karras": ", spaced as by Karras", "ays": ", spaced by Align Your Steps"}[self.spacing]
        sentence = f"The solver is {self.solver}, in {asked} steps{spaced}, in place of {steps}."
        if self.computed is None:
            return sentence
        return f"{sentence} Of these, the steps {', '.join(map(str, self.computed))} are computed."

    def check(self, model: nn.Module) -> None:
        """It depends on the scheduler alone."""

    def check_pipeline(self, pipe: Any) -> None:
        """The pipeline's scheduler must be of a kind whose settings the solver understands."""
        other_scheduler(self.text, pipe, self.solver, self.spacing)

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        """Give the pipeline the other scheduler."""
        scheduler = other_scheduler(self.text, pipe, self.solver, self.spacing)
        with scheduler_replaced(pipe, scheduler if self.computed is None else thinned(scheduler, self.computed)):
            yield
