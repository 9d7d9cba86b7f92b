"""Which steps of a generation are computed."""

from __future__ import annotations

from toma_diffusion.config import Skip
from toma_diffusion.skip.levels import Levels

GROWTH = 2.0
"""Without known noise levels the position of computed step k is proportional to k to this power."""
LAST_DISTANCE = 0.75
"""What follows the last computed step, in average distances."""


def computed_steps(skip: Skip, num_steps: int, levels: Levels | None = None) -> tuple[int, ...]:
    """The steps of `num_steps` that are computed.

    Example:

    ```python
    >>> from toma_diffusion import Skip
    >>> computed_steps(Skip(computed=8), 20)
    (0, 1, 2, 3, 6, 9, 13, 18)
    ```
    """
    if num_steps < skip.min_steps:
        return tuple(range(num_steps))
    if isinstance(skip.computed, tuple):
        return tuple(step for step in skip.computed if step < num_steps)
    count = skip.computed
    if isinstance(count, float):
        count = min(max(round(count * num_steps), skip.fewest), num_steps - 1)
    return spread(max(1, count), num_steps)


def spread(count: int, num_steps: int) -> tuple[int, ...]:
    """So many steps, close together at first."""
    if count >= num_steps:
        return tuple(range(num_steps))
    end = num_steps - LAST_DISTANCE * num_steps / count
    chosen = [0]
    for number in range(1, count):
        wanted = round(end * (number / (count - 1)) ** GROWTH)
        chosen.append(min(max(wanted, chosen[-1] + 1), num_steps - count + number))
    return tuple(chosen)
