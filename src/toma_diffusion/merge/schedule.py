"""What merging does in which step: select destinations, compute weights, or keep both."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from toma_diffusion.merge.base import Merging


class Action(Enum):
    """What a plan does in a step. Three values and no counter, so that compiled code has at most three variants."""

    SELECT = "select"
    """Select destinations, then compute their weights."""
    REWEIGH = "reweigh"
    """Keep the destinations, compute their weights."""
    REUSE = "reuse"
    """Keep both."""


@dataclass(frozen=True)
class Schedule:
    """What to do in every step of a generation.

    It has no state. The first step that merges always selects.

    Example:

    ```python
    >>> from toma_diffusion.merge import Schedule
    >>> schedule = Schedule(select_every=10, reweigh_every=5)
    >>> [schedule.action(step, 50).value for step in (0, 1, 5, 10)]
    ['select', 'reuse', 'reweigh', 'select']
    ```
    """

    select_every: int = 10
    reweigh_every: int = 5
    window: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def from_config(cls, config: Merging) -> Schedule:
        return cls(config.select_every, config.reweighed_every, config.window)

    @property
    def needs(self) -> str | None:
        """The setting because of which the number of steps must be known; None if it need not be."""
        return None if self.window == (0.0, 1.0) else f"window={self.window}"

    def merges(self, num_steps: int) -> bool:
        """Whether tokens are merged in any of `num_steps` steps."""
        return any(self.action(step, num_steps) is not None for step in range(num_steps))

    def action(self, step: int, num_steps: int | None = None, computed: Collection[int] | None = None) -> Action | None:
        """What plans do in `step` (counted from 0) of `num_steps`. None if no tokens are merged in it.

        `num_steps` may be None only if nothing depends on it. If steps are skipped, only the `computed` ones count.
        """
        if num_steps is None and self.needs is not None:
            raise ValueError(f"{self.needs} needs the number of steps, which is not known here: pass num_steps.")
        if not self._merges_in(step, num_steps):
            return None
        first = _steps(self.window[0], num_steps)
        since_first = step - first
        if computed is not None:
            since_first = sum(first <= each < step for each in computed)
        since_select = since_first % self.select_every
        if since_select == 0:
            return Action.SELECT
        return Action.REWEIGH if since_select % self.reweigh_every == 0 else Action.REUSE

    def _merges_in(self, step: int, num_steps: int | None) -> bool:
        start, end = self.window
        return step >= _steps(start, num_steps) and (end == 1 or step < _steps(end, num_steps))


def _steps(share: float, num_steps: int | None) -> int:
    """The number of steps before this fraction of all. Rounded first, because 0.1 · 30 is 3.0000000000000004."""
    return math.ceil(round(share * (num_steps or 0), 6))
