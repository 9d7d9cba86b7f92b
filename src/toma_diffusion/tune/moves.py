"""Schedules next to a schedule of reuse over time: one computed step comes one earlier, or one later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toma_diffusion.core import Schedule
from toma_diffusion.core.schedule import computed_steps
from toma_diffusion.evaluation.plan import Variant

REPLACED = ("period", "growth", "start", "end", "min_computed")
"""Fields of `Reuse` that `computed` takes the place of."""


def moved(variant: Variant, steps: int) -> list[Variant]:
    """All candidates that differ from this one in one computed step, by one place; none if it does not reuse.

    Args:
        steps: of the run.
    """
    config, left = variant.config, variant.steps_of(steps)
    if config is None or config.reuse is None or not Schedule.from_config(config).reuses_any(left):
        return []
    kept = [name for name in variant.overrides if name not in (*REPLACED, "computed")]
    return [
        replace(variant, config=config.changed({"computed": computed}), overrides=(*kept, "computed"))
        for computed in moved_steps(computed_steps(config.reuse, left), left)
    ]


def moved_steps(computed: tuple[int, ...], steps: int) -> Iterator[tuple[int, ...]]:
    """The same for the steps alone. The first step is always computed.

    Example:

    ```python
    >>> list(moved_steps((0, 1, 3), 4))
    [(0, 2, 3), (0, 1, 2)]
    ```
    """
    for place, step in enumerate(computed[1:], start=1):
        for other in (step - 1, step + 1):
            if 0 < other < steps and other not in computed:
                yield tuple(sorted((*computed[:place], other, *computed[place + 1 :])))
