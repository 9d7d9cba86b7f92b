"""The passes over a step, such as the two halves of guidance. Each is predicted from its own outputs alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toma_diffusion.engine.clock import Identity, Tick
from toma_diffusion.skip.history import History, Seen

if TYPE_CHECKING:
    from toma_diffusion.skip.denoiser import Skipper

NAMED = "cache_context"
"""How diffusers' pipelines name the passes over a step: `with transformer.cache_context("cond"):`."""


@dataclass(eq=False)
class Passes:
    """Those of one generation."""

    count: int = 0
    """Over its first step."""
    last_computed: int = -1
    """The last step that was computed."""
    _histories: dict[Hashable, History] = field(default_factory=dict)
    _named: dict[str, int] = field(default_factory=dict)
    """How many passes over this step had that name, less one."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._histories.values())

    @property
    def can_predict(self) -> bool:
        return any(map(self.is_latest, self._histories.values()))

    def is_latest(self, history: History) -> bool:
        """Whether its pass came in the last computed step."""
        return history.steps[0] == self.last_computed

    def key_of(self, tick: Tick, name: str | None, *, begins_step: bool) -> Hashable:
        """Which pass a call is: by the pipeline's name for it, or by its place among the passes over the step."""
        if begins_step or tick.pass_index == 0:
            self._named.clear()
        if name is None:
            return tick.pass_index
        number = self._named[name] = self._named.get(name, -1) + 1
        return name, number

    def history(self, key: Hashable, seen: Seen) -> History | None:
        """The outputs of this pass; None if there are none that fit."""
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            return None
        if not history.conditioning.holds(seen.conditioning):
            others = [each for each in self._histories.values() if each.conditioning.holds(seen.conditioning)]
            if others or not history.conditioning.is_gone:
                return None  # passes have changed places
        return history

    def note(self, tick: Tick) -> None:
        self.last_computed = tick.step
        if tick.step == 0:
            self.count = max(self.count, (tick.pass_index + 1) * tick.parts)

    def keep(self, key: Hashable, step: int, output: Any, seen: Seen, needs: tuple[int, bool]) -> History:
        """Keep the output of a computed pass. Returns all that are kept of it."""
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            history = self._histories[key] = History(seen.shapes)
        history.conditioning = Identity(seen.conditioning)
        history.keep(step, output, seen, *needs)
        return history


@dataclass(eq=False)
class NamedPasses:
    """`cache_context` of a denoiser: notes the name of the pass, and does what it did before."""

    skipper: Skipper

    @contextmanager
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        skipper = self.skipper
        before, skipper.pass_name = skipper.pass_name, name
        try:
            with getattr(type(skipper.model), NAMED)(skipper.model, name, *args, **kwargs):
                yield
        finally:
            skipper.pass_name = before
