"""What is known of the request that a denoiser is serving: its generation, its step, its pass.

It knows no technique. Those that merge tokens or skip steps have states of their own, and share this one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

from toma_diffusion.engine.clock import StepCounter, Tick
from toma_diffusion.errors import UsageError


class Technique(Protocol):
    """What makes a denoiser faster."""

    def acts_in(self, num_steps: int) -> bool:
        """Whether it does anything in a generation of so many steps."""

    def why_idle(self, num_steps: int) -> str:
        """The setting because of which it does nothing there."""

    def forget(self) -> None:
        """Begin anew: forget all choices and outputs."""


@dataclass
class Session:
    """The request in progress. Every call of the denoiser updates it, outside compiled code."""

    steps: StepCounter
    enabled: bool = True
    tick: Tick | None = None
    """The place of the call that is running, once it is read."""
    computed: tuple[int, ...] | None = None
    """The steps of this generation in which the denoiser runs, if it does not run in all."""
    preset: str | None = None
    """The name of the preset that the settings come from, if they do."""
    only_steps: int | None = None
    """The number of steps that the settings are for; generations of another number are refused. None: any."""
    notes: set[str] = field(default_factory=set)
    """What calls had to do differently from the settings, for `summary()`."""
    techniques: list[Technique] = field(default_factory=list)
    acted: bool = False
    """Whether anything was merged or skipped in this generation."""

    def __post_init__(self) -> None:
        self._generation = 0
        """The one that the last call belonged to."""
        self._last: Tick | None = None
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_generation": 0, "tick": None}  # a copied or pickled model begins a new generation

    def begin_call(self, tick: Tick) -> bool:
        """Take note of a call. Returns whether it begins a generation."""
        self._check_steps(tick)
        begins, self._generation = tick.generation != self._generation, tick.generation
        if begins:
            self._begin_generation(tick)
        self.acted = self.acted or self.computed is not None
        self._last = tick
        return begins

    def _check_steps(self, tick: Tick) -> None:
        """Refuse a generation of another number of steps than the settings are for."""
        if self.only_steps is None or not self.enabled or tick.num_steps == self.only_steps:
            return
        if tick.num_steps is None:
            raise UsageError(
                f"these settings are for {self.only_steps} steps, and the number of steps is not known here: call "
                "handle.begin(num_steps) before a generation, or run the model inside a pipeline."
            )
        raise UsageError(
            f"these settings were found for {self.only_steps} steps, and this generation has {tick.num_steps}: "
            f"generate with {self.only_steps}, or run `toma tune --steps {tick.num_steps}`."
        )

    def _begin_generation(self, tick: Tick) -> None:
        """Warn if nothing was done in the last generation, or if nothing will be done in this one."""
        last = self._last
        if last is not None and last.num_steps is not None and not self.acted and not last.is_exact:
            counted = f"{last.step + 1} of {last.num_steps} steps were counted"
            advice = f" ({counted}; where that is wrong, call handle.begin(num_steps) and handle.step(i))"
            self._warn_nothing_done(last.num_steps, advice)
        elif tick.num_steps is not None and not self._will_act(tick.num_steps):
            self._warn_nothing_done(tick.num_steps)
        self.acted = not self.enabled  # no warning about a generation that ran while all was switched off

    def _will_act(self, num_steps: int) -> bool:
        return self.computed is not None or any(each.acts_in(num_steps) for each in self.techniques)

    def _warn_nothing_done(self, num_steps: int, advice: str = "") -> None:
        if self._has_warned or not self.enabled:
            return
        self._has_warned = True
        settings = " and ".join(filter(None, (each.why_idle(num_steps) for each in self.techniques)))
        settings = settings or "these settings"
        if self.preset is not None:
            settings = f"the preset {self.preset!r}"
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        warnings.warn(
            f"a generation of {steps} was not made faster at all: none is merged or skipped with {settings}{advice}.",
            stacklevel=2,
        )
