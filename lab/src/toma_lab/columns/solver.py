"""Another solver of diffusers in place of the pipeline's: what a user would try first for fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from toma_diffusion.checks import listed
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut, at_least, one_of, written
from toma_lab.columns.schedulers import CLASSES, other_scheduler
from toma_lab.columns.steps import check_computed, check_within, scheduler_replaced
from toma_lab.columns.thinned import thinned

OWN = "own"
SPACED = {OWN: "", "ays": ", spaced by Align Your Steps"}


class Solver(Shortcut):
    """The same model and noise, another solver.

    Settings: `name`; `steps`, how many the solver takes, by default as many as the run; `spacing`, `own` as diffusers
    spaces the steps of this solver, `ays` Align Your Steps; `computed`, those of its steps that
    are computed, by default all.
    """

    name = "solver"
    knob = "steps"
    checks = {"name": one_of(*CLASSES), "steps": at_least(1), "spacing": one_of(*SPACED), "computed": check_computed}  # noqa: RUF012
    usual = {"spacing": OWN}  # noqa: RUF012
    is_cache = False
    needs_pipeline = True

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Solver:
        found = super().from_settings(settings)
        if "name" not in settings:
            raise UsageError(f"solver needs a name, such as solver:name=dpmpp-2m;steps=8: {listed(CLASSES)}.")
        return cls(tuple((name, found.value(name)) for name in cls.checks if found.value(name) not in (None, OWN)))

    @property
    def computed(self) -> tuple[int, ...] | None:
        """Those of its steps that are computed."""
        computed: tuple[int, ...] | None = self.value("computed")
        return computed

    @property
    def title(self) -> str:
        """`dpmpp-2m, 8 steps, ays`."""
        steps, spacing = self.value("steps"), self.value("spacing")
        parts = [self.value("name"), steps and f"{steps} steps", spacing != OWN and spacing]
        return ", ".join([*filter(None, parts), *([] if self.computed is None else [written(self.computed)])])

    @property
    def line(self) -> tuple[str, str]:
        return self.value("name"), self.settings.get("spacing", "")

    @property
    def point(self) -> str:
        return str(self.value("steps") or "") if self.computed is None else str(len(self.computed))

    def steps_of(self, steps: int) -> int:
        asked = self.requested_steps(steps)
        if self.computed is None:
            return asked
        check_within(self.text, self.computed, asked)
        return len(self.computed)

    def requested_steps(self, steps: int) -> int:
        own: int = self.value("steps") or steps
        if own > steps:
            raise UsageError(f"{self.text!r} has more than the {steps} steps of the run: give fewer, or a run of more.")
        return own

    def sentence(self, steps: int) -> str:
        spaced = SPACED[self.value("spacing")]
        asked = self.requested_steps(steps)
        sentence = f"The solver is {self.value('name')}, in {asked} steps{spaced}, in place of {steps}."
        if self.computed is None:
            return sentence
        return f"{sentence} Of these, the steps {', '.join(map(str, self.computed))} are computed."

    def check_pipeline(self, pipe: Any) -> None:
        self._scheduler(pipe)

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[None]:
        scheduler = self._scheduler(pipe)
        with scheduler_replaced(pipe, scheduler if self.computed is None else thinned(scheduler, self.computed)):
            yield

    def _scheduler(self, pipe: Any) -> Any:
        return other_scheduler(self.text, pipe, self.value("name"), self.value("spacing"))
