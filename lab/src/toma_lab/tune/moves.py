"""Schedules next to a schedule of computed steps: one of them comes one earlier, or one later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toma_lab.columns import Column
from toma_lab.columns.ours import SKIP_FIELDS


def moved(column: Column, steps: int, computed: tuple[int, ...] | None = None) -> list[Column]:
    """All candidates that differ from this one in one computed step, by one place; none if it skips nothing.

    Args:
        steps: of the run.
        computed: the steps that it computed, if they are known: noise levels decide it, unless they are listed.
    """
    own, left = column.own, column.steps_of(steps)
    if own is None or own.at(left).skip is None:
        return []
    overrides = (*(name for name in column.overrides if name not in SKIP_FIELDS), "computed")
    return [
        replace(column, own=own.with_computed(other), overrides=overrides)
        for other in moved_steps(computed or own.computed(left), left)
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
