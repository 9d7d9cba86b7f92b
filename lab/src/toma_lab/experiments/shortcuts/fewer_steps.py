"""Fewer steps: the plainest way to save time, with which any other has to be compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from toma_diffusion.checks import check_integer
from toma_diffusion.errors import UsageError
from toma_lab.experiments.shortcuts.base import Shortcut, check_known


@dataclass(frozen=True)
class FewerSteps(Shortcut):
    """The same model, scheduler and noise, in fewer steps."""

    name = knob = "steps"
    is_cache = False

    steps: int

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FewerSteps:
        """From `steps=14`."""
        check_known(cls.name, settings, ("steps",))
        return cls(check_integer("steps", settings.get("steps"), minimum=1))

    @property
    def settings(self) -> dict[str, Any]:
        """How many."""
        return {"steps": self.steps}

    @property
    def text(self) -> str:
        """`steps:14`."""
        return f"{self.name}:{self.steps}"

    @property
    def title(self) -> str:
        """`14 steps`."""
        return f"{self.steps} steps"

    @property
    def family(self) -> tuple[str, str]:
        """In words."""
        return "fewer steps", ""

    def steps_of(self, steps: int) -> int:
        """So many, if the run has more."""
        if self.steps >= steps:
            raise UsageError(
                f"{self.text!r} is not fewer than the {steps} steps of the run: give fewer, or a run of more."
            )
        return self.steps

    def sentence(self, steps: int) -> str:
        """`14 steps are taken in place of 20.`"""
        return f"{self.steps} steps are taken in place of {steps}."

    def check(self, model: nn.Module) -> None:
        """Any model can take fewer."""

    def applied(self, pipe: Any, steps: int) -> AbstractContextManager[object]:
        """Nothing to do: the pipeline is asked for fewer."""
        return nullcontext()
