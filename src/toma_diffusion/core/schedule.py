"""What happens in which step: compute or reuse; and in the steps that merge, select destinations, compute weights, or
keep both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from toma_diffusion.config import Config, Reuse

FEWEST_FOR_LINES = 6
"""With so many computed steps, or fewer, `order="auto"` follows no line: see docs/quality.md."""


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
    >>> from toma_diffusion import Reuse, Schedule
    >>> schedule = Schedule(select_every=10, reweigh_every=5)
    >>> [schedule.action(step, 50).value for step in (0, 1, 5, 10)]
    ['select', 'reuse', 'reweigh', 'select']
    >>> schedule = Schedule(reuse=Reuse(period=3, start=0.2))
    >>> [step for step in range(10) if not schedule.reuses(step, 10)]
    [0, 1, 4, 7]
    ```
    """

    select_every: int = 10
    reweigh_every: int = 5
    window: tuple[float, float] = (0.0, 1.0)
    max_steps: int | None = None
    reuse: Reuse | None = None

    @classmethod
    def from_config(cls, config: Config) -> Schedule:
        """The schedule of a configuration."""
        return cls(config.select_every, config.reweigh_every, config.window, config.max_steps, config.reuse)

    @property
    def needs(self) -> str | None:
        """The setting because of which the number of steps must be known; None if it need not be."""
        if self.window != (0.0, 1.0):
            return f"window={self.window}"
        if self.max_steps is not None:
            return f"max_steps={self.max_steps}"
        reuse = self.reuse
        if reuse is None or (reuse.period == 1 and reuse.computed is None):
            return None
        if reuse.min_steps > 1:
            return f"min_steps={reuse.min_steps}"
        if reuse.computed is None and (reuse.start or reuse.end or reuse.growth > 1 or reuse.min_computed > 1):
            return f"start={reuse.start}, end={reuse.end}, growth={reuse.growth}, min_computed={reuse.min_computed}"
        return None

    def merges(self, num_steps: int) -> bool:
        """Whether tokens are merged in any of `num_steps` steps."""
        return any(self.action(step, num_steps) is not None for step in range(num_steps))

    def reuses_any(self, num_steps: int | None) -> bool:
        """Whether any of `num_steps` steps reuses; if their number is not known, whether one may."""
        if num_steps is None:
            return self.reuse is not None and (self.reuse.computed is not None or self.reuse.period > 1)
        return any(self.reuses(step, num_steps) for step in range(num_steps))

    def settings_that_do_nothing(self, num_steps: int, *, merges: bool, reuses: bool) -> str:
        """The settings because of which none of `num_steps` steps merges or reuses, if none does.

        Args:
            merges: whether there is anything to merge at all.
            reuses: whether there is anything to reuse at all.
        """
        named: list[str] = []
        if merges:
            few = self.max_steps is None or num_steps <= self.max_steps
            named.append(f"window={self.window}" if few else f"max_steps={self.max_steps}")
        if reuses and self.reuse is not None:
            reuse = self.reuse
            few = num_steps < reuse.min_steps
            when = f"start={reuse.start}, end={reuse.end}" if reuse.computed is None else f"computed={reuse.computed}"
            named.append(f"min_steps={reuse.min_steps}" if few else when)
        return " and ".join(named)

    def corrects(self, num_steps: int | None) -> bool:
        """Whether tokens are merged only to correct what is reused."""
        return self.reuse is not None and self.reuse.update != "nothing" and self.reuses_any(num_steps)

    def reuses(self, step: int, num_steps: int | None = None) -> bool:
        """Whether `step` (counted from 0) of `num_steps` reuses what earlier ones computed."""
        reuse = self.reuse
        self._check_known(num_steps)
        if reuse is None or (num_steps is not None and num_steps < reuse.min_steps):
            return False
        if num_steps is None:
            return step not in reuse.computed if reuse.computed is not None else _is_between(step, 1, reuse.period)
        return step < num_steps and step not in computed_steps(reuse, num_steps)  # further ones are computed

    def order(self, num_steps: int | None) -> float:
        """How far the line through the last two computed changes is followed in a generation of `num_steps` steps."""
        if self.reuse is None:
            return 0.0
        if not isinstance(self.reuse.order, str):
            return self.reuse.order
        computed = 0 if num_steps is None else len(computed_steps(self.reuse, num_steps))
        return max(0.0, 1 - FEWEST_FOR_LINES / computed) if computed else 0.0

    def action(self, step: int, num_steps: int | None = None) -> Action | None:
        """What plans do in `step` (counted from 0) of `num_steps`. None if no tokens are merged in it.

        `num_steps` may be None only if nothing depends on it.
        """
        self._check_known(num_steps)
        if not self._merges_in(step, num_steps):
            return None
        first = _steps(self.window[0], num_steps)
        since_first = step - first
        if self.reuses_any(num_steps):  # only steps that merge count
            since_first = sum(self._merges_in(earlier, num_steps) for earlier in range(first, step))
        since_select = since_first % self.select_every
        if since_select == 0:
            return Action.SELECT
        return Action.REWEIGH if since_select % self.reweigh_every == 0 else Action.REUSE

    def _merges_in(self, step: int, num_steps: int | None) -> bool:
        start, end = self.window
        if self.max_steps is not None and (num_steps or 0) > self.max_steps:
            return False
        if step < _steps(start, num_steps) or (end < 1 and step >= _steps(end, num_steps)):
            return False
        return self.reuses(step, num_steps) == self.corrects(num_steps)

    def _check_known(self, num_steps: int | None) -> None:
        if num_steps is None and self.needs is not None:
            raise ValueError(f"{self.needs} needs the number of steps, which is not known here: pass num_steps.")


@lru_cache(maxsize=64)
def computed_steps(reuse: Reuse, num_steps: int) -> tuple[int, ...]:
    """The steps of `num_steps` that are computed, whatever `min_steps` says.

    Example:

    ```python
    >>> from toma_diffusion import Reuse
    >>> computed_steps(Reuse(period=2.5, growth=1.5, start=0), 20)
    (0, 1, 3, 5, 8, 11, 14, 18)
    ```
    """
    if reuse.computed is not None:
        return tuple(step for step in reuse.computed if step < num_steps)
    first, last = max(1, _steps(reuse.start, num_steps)), num_steps - _steps(reuse.end, num_steps)
    whole = [*range(min(first, num_steps)), *range(max(first, last), num_steps)]
    between = [step for step in range(first, last) if not _is_between(step, first, reuse.period)]
    if reuse.period > 1 and (reuse.growth > 1 or len(whole) + len(between) < reuse.min_computed):
        between = _spread(reuse, first, last, reuse.min_computed - len(whole))
    return tuple(sorted([*whole, *between]))


def _is_between(step: int, first: int, period: float) -> bool:
    """Whether a step lies between two computed ones, which come after the first steps at equal distances."""
    if step < first:
        return False
    since = step - first + 1
    return math.floor(since / period) == math.floor((since - 1) / period)


def _spread(reuse: Reuse, first: int, last: int, least: int) -> list[int]:
    """Steps from `first` to before `last`, at distances that grow: `least` or more, but not all of them.

    Distances begin at the step before `first`, which is computed too. After the last step there are three quarters of
    the average distance.
    """
    if last <= first:
        return []
    steps = last - first + 1
    count = max(round(steps / reuse.period), least + 1)
    count = max(1, min(count, steps - 1))
    end = steps - 0.75 * steps / count
    chosen = [0]
    for number in range(1, count):
        wanted = round(end * (number / (count - 1)) ** reuse.growth)
        chosen.append(min(max(wanted, chosen[-1] + 1), steps - count + number))
    return [first - 1 + step for step in chosen[1:]]


def _steps(share: float, num_steps: int | None) -> int:
    """The number of steps before this fraction of all. Rounded first, because 0.1 · 30 is 3.0000000000000004."""
    return math.ceil(round(share * (num_steps or 0), 6))
