"""Fewer steps: the plainest way to save time, with which any other has to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut, at_least


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
