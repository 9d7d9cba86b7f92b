"""Which steps of a generation are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from toma_diffusion.config import Skip
from toma_diffusion.skip.levels import Levels

CLEAREST = 2.0
"""Above this logarithm of signal to noise a denoiser changes hardly anything any more."""
TAIL = 0.5
"""What follows the last computed step, in distances between computed steps."""
GROWTH = 2.0
"""Without known noise levels the position of computed step k is proportional to k to this power."""
LAST_DISTANCE = 0.75
"""What then follows the last computed step, in average distances."""


def computed_steps(skip: Skip, num_steps: int, levels: Levels | None = None) -> tuple[int, ...]:
    """The steps of `num_steps` that are computed.

    Example:

    ```python
    >>> from toma_diffusion import Skip
    >>> computed_steps(Skip(computed=8), 20)
    (0, 1, 2, 3, 6, 9, 13, 18)
    ```
    """
    count = skip.count(num_steps)
    if count >= num_steps:
        return tuple(range(num_steps))
    if skip.learned is not None and skip.learned.num_steps == num_steps:
        return skip.learned.of(count).computed
    if isinstance(skip.computed, tuple):
        return tuple(step for step in skip.computed if step < num_steps)
    return spread_by_index(count, num_steps) if levels is None else spread(count, levels.log_signal_to_noise[:num_steps])


def spread(count: int, levels: Sequence[float]) -> tuple[int, ...]:
    """So many steps, evenly spaced in the logarithm of signal to noise, after the first.

    Args:
        count: how many.
        levels: the logarithm by step, rising.
    """
    clipped = [min(level, CLEAREST) for level in levels]
    end, chosen = len(levels), [0]
    # The first step is often noise alone, infinitely far from the next.
    start, intervals = (clipped[1], count - 2) if end > 1 else (clipped[0], 0)
    distance = (clipped[-1] - start) / (intervals + TAIL)
    for number in range(1, count):
        wanted = start + (number - 1) * distance
        allowed = range(chosen[-1] + 1, end - count + number + 1)
        chosen.append(min(allowed, key=lambda step: abs(clipped[step] - wanted)))
    return tuple(chosen)


def spread_by_index(count: int, num_steps: int) -> tuple[int, ...]:
    """So many steps, close together at first: if noise levels are not known."""
    end = num_steps - LAST_DISTANCE * num_steps / count
    chosen = [0]
    for number in range(1, count):
        wanted = round(end * (number / (count - 1)) ** GROWTH)
        chosen.append(min(max(wanted, chosen[-1] + 1), num_steps - count + number))
    return tuple(chosen)
