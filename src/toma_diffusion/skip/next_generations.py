"""Learns from the next generations while they are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from toma_diffusion.engine.clock import Tick
from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import BySteps
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.fitting import Fit
from toma_diffusion.skip.history import Seen
from toma_diffusion.skip.learned import Learned, LearnedSteps
from toma_diffusion.skip.recording import About, Recorder, Trajectory
from toma_diffusion.skip.schedule import lists_of


class NextGenerations(Recorder):
    """Learns from the next generations while they are used: they run whole, and the closed form follows.

    It never raises: `when_done` gets what was learned, or why nothing was. The other arguments are those of `Learning`.
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
        for count, computed in lists_of(self.wanted, last.num_steps, last.required, about.levels).items():
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
