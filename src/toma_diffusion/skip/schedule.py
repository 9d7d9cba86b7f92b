"""Which steps of a generation are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import BySteps, Skip
from toma_diffusion.skip.levels import Levels

CLEAREST, NOISIEST = 2.0, -20.0
"""Above the first logarithm of signal to noise a denoiser changes hardly anything any more; below the other one there
is only noise."""
SECOND_OF_TWO = 0.6
"""Where the other step is if two are computed."""
GROWTH = 1.2
"""The position of computed step k is proportional to k to this power: early errors change what a picture shows."""
TAIL = 0.25
"""What follows the last computed step, in average distances: the last steps decide how sharp a picture is."""
GROWTH_BY_INDEX, TAIL_BY_INDEX = 2.0, 0.75
"""The same where noise levels are not known."""


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
    return (
        spread_by_index(count, num_steps) if levels is None else spread(count, levels.log_signal_to_noise[:num_steps])
    )


def spread(count: int, levels: Sequence[float]) -> tuple[int, ...]:
    """So many steps, nearly evenly spaced in these logarithms of signal to noise, which rise, after the first."""
    clipped = [max(NOISIEST, min(level, CLEAREST)) for level in levels]
    chosen, start = [0], clipped[min(1, len(levels) - 1)]  # the first step is often noise alone, infinitely far off
    last = clipped[-1] - TAIL * (clipped[-1] - start) / max(1.0, count - 2 + TAIL)
    for number in range(1, count):
        share = ((number - 1) / (count - 2)) ** GROWTH if count > 2 else SECOND_OF_TWO
        wanted = start + (last - start) * share
        allowed = range(chosen[-1] + 1, len(levels) - count + number + 1)
        chosen.append(min(allowed, key=lambda step: abs(clipped[step] - wanted)))
    return tuple(chosen)


def spread_by_index(count: int, num_steps: int) -> tuple[int, ...]:
    """So many steps, close together at first: if noise levels are not known."""
    end = num_steps - TAIL_BY_INDEX * num_steps / count
    chosen = [0]
    for number in range(1, count):
        wanted = round(end * (number / (count - 1)) ** GROWTH_BY_INDEX)
        chosen.append(min(max(wanted, chosen[-1] + 1), num_steps - count + number))
    return tuple(chosen)


def lists_of(
    wanted: Sequence[BySteps], num_steps: int, required: Sequence[int], levels: Levels | None
) -> dict[int, tuple[int, ...]]:
    """The steps that learning begins with, by their number, most first. `wanted` says how many, or which."""
    found: dict[int, tuple[int, ...]] = {}
    skips = [skip for by_steps in wanted if (skip := by_steps(num_steps)) is not None]
    for skip in sorted(skips, key=lambda each: isinstance(each.computed, tuple)):  # lists of one's own count most
        if (count := skip.count(num_steps)) < num_steps:
            computed = computed_steps(replace(skip, learned=None), num_steps, levels)
            found[count] = with_required(computed, required)
    if not found:
        raise UsageError(
            f"all {num_steps} steps would be computed: there is nothing to learn. Learn with more steps, or say how "
            "many are computed."
        )
    return dict(sorted(found.items(), reverse=True))


def with_required(computed: tuple[int, ...], required: Sequence[int]) -> tuple[int, ...]:
    """The same number of steps, with the first step of every denoiser among them."""
    for step in required:
        if step not in computed:
            free = [each for each in computed if each not in required and each != 0]
            if not free:
                raise UsageError(
                    f"{len(computed)} computed steps are too few: each of the {len(required)} denoisers computes its "
                    "first."
                )
            nearest = min(free, key=lambda each: abs(each - step))
            computed = tuple(sorted({*computed, step} - {nearest}))
    return computed
