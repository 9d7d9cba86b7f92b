"""What happens in which step: select destinations, compute weights, reuse both, or do not merge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from toma_diffusion.config import Config


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
    """The action of every step of a generation.

    It has no state. The first step inside the window always selects.

    Example:

    ```python
    >>> from toma_diffusion import Schedule
    >>> schedule = Schedule(select_every=10, reweigh_every=5)
    >>> [schedule.action(step, 50).value for step in (0, 1, 5, 10)]
    ['select', 'reuse', 'reweigh', 'select']
    ```
    """

    select_every: int = 10
    reweigh_every: int = 5
    window: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def from_config(cls, config: Config) -> Schedule:
        """The schedule of a configuration."""
        return cls(config.select_every, config.reweigh_every, config.window)

    def opens(self, num_steps: int) -> bool:
        """Whether any of `num_steps` steps is inside the window."""
        return any(self.action(step, num_steps) is not None for step in range(num_steps))

    def action(self, step: int, num_steps: int | None = None) -> Action | None:
        """What to do in `step` (counted from 0) of `num_steps`. None outside the window, where nothing is merged.

        `num_steps` may be None only if the window is the whole generation.
        """
        start, end = self.window
        if num_steps is None and (start, end) != (0.0, 1.0):
            raise ValueError(
                f"window={self.window} needs the number of steps, which is not known here: "
                "pass num_steps, or use window=(0.0, 1.0)."
            )
        first = _steps(start, num_steps)
        if step < first or (end < 1 and step >= _steps(end, num_steps)):
            return None
        since_select = (step - first) % self.select_every
        if since_select == 0:
            return Action.SELECT
        return Action.REWEIGH if since_select % self.reweigh_every == 0 else Action.REUSE


def _steps(share: float, num_steps: int | None) -> int:
    """The number of steps before this fraction of all. Rounded first, because 0.1 · 30 is 3.0000000000000004."""
    return math.ceil(round(share * (num_steps or 0), 6))
