"""Settings of reuse over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from toma_diffusion.config.checks import (
    check_integer,
    check_known,
    check_number,
    check_one_of,
    check_sequence,
)
from toma_diffusion.errors import UsageError

PARTS = ("blocks", "deep")
UPDATES = ("nothing", "clusters", "destinations")
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """When parts of a model are not computed, and what is used in their place. Immutable.

    A part is a run of blocks. Its change is what it adds to the tokens. In a step that reuses, the part is not
    computed: the change of the last computed steps is added again.

    Example:

    ```python
    >>> from toma_diffusion import Reuse, ToMAConfig
    >>> config = ToMAConfig(ratio=0, reuse=Reuse(period=3))
    >>> ToMAConfig.from_json(config.to_json()).reuse.period
    3
    ```
    """

    period: float = 2
    """One step in so many is computed, on average, of those outside `start` and `end`. Higher is faster and loses more
    detail; with 1 nothing is reused."""

    growth: float = 1.0
    """How the distances between computed steps grow. With 1 they are all equal. Above 1, steps are computed often at
    the beginning, which decides what the image shows, and less and less often after that: the position of computed
    step k is proportional to k**growth. Higher keeps the composition of more images, and loses more of their
    detail."""

    start: float = 0.2
    """Fraction of the steps, at the beginning, that are all computed. They give the image its composition, and changes
    differ most from step to step there. The first step always is computed."""

    end: float = 0.0
    """Fraction of the steps, at the end, that are all computed."""

    min_computed: int = 1
    """At least so many steps are computed, but at least one reuses, outside `start` and `end`. The fewer steps a
    generation has, the more changes differ from one to the next. A preset's minimum is for its own `period`: if you
    change that and not this, there is none."""

    computed: tuple[int, ...] | None = None
    """The steps that are computed, counted from 0, in place of all that is said above. The others reuse."""

    order: float | str = "auto"
    """How far the line through the last two computed changes is followed: 0 uses the last change as it was, 1 continues
    the line, 0.5 goes half of the way. `auto` is 1 - 6 / c for c computed steps, and 0 if they are 6 or fewer, or if
    their number is not known. Over short distances a line is a good guess, over long ones it leads astray."""

    part: str = "blocks"
    """What is reused: the transformer `blocks`, or everything `deep`. That matters in UNets only: everything below the
    first level is then one part, including its residual blocks. This is faster: a step of SDXL that reuses computes
    the first level alone."""

    keep: tuple[str, ...] = ()
    """Parts that are computed in every step, by the beginning of their names in `handle.summary()`."""

    update: str = "nothing"
    """What a step that reuses still computes. `nothing` is fastest. Otherwise the blocks run on merged tokens and
    correct the remembered change: `clusters` adds what it lacks on average in every cluster of tokens, `destinations`
    replaces the change of the destinations alone. Needs merging, in scope `block` or `stage`; the other steps are then
    not merged."""

    min_steps: int = 1
    """In generations of fewer steps nothing is reused: from one step to the next, changes are too different there."""

    def __post_init__(self) -> None:
        for name in ("period", "growth"):
            value = check_number(name, getattr(self, name), "1 or more, and finite", lambda x: 1 <= x < math.inf)
            self._set(name, int(value) if name == "period" and value.is_integer() else value)
        for name in ("start", "end"):
            rule = f"0 ≤ {name} ≤ 1"
            self._set(name, check_number(name, getattr(self, name), rule, lambda share: 0 <= share <= 1))
        self._set("min_computed", check_integer("min_computed", self.min_computed, minimum=1))
        if self.computed is not None:
            self._set("computed", self._valid_steps())
        if self.order != AUTO:
            rule = "'auto', or from 0 (the last change as it was) to 1 (continued in a line)"
            order = check_number("order", self.order, rule, lambda share: 0 <= share <= 1)
            self._set("order", int(order) if order.is_integer() else order)
        check_one_of("part", self.part, PARTS)
        check_one_of("update", self.update, UPDATES)
        self._set("keep", self._valid_names())
        self._set("min_steps", check_integer("min_steps", self.min_steps, minimum=1))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reuse:
        """From fields by name. Missing ones take their defaults, unknown ones raise `UsageError`."""
        if not isinstance(values, Mapping):
            raise UsageError(f"reuse={values!r} is not allowed: pass a Reuse, a mapping of its fields, or None.")
        check_known(cls.__name__, values, REUSE_FIELDS)
        return cls(**values)

    def _valid_steps(self) -> tuple[int, ...]:
        steps = check_sequence("computed", self.computed, "steps, counted from 0")
        steps = tuple(sorted({check_integer("computed", step, minimum=0) for step in steps}))
        if not steps or steps[0] != 0:
            raise UsageError(f"computed={self.computed!r} lacks step 0: the first step has nothing to reuse.")
        return steps

    def _valid_names(self) -> tuple[str, ...]:
        names = check_sequence("keep", self.keep, "beginnings of the names of parts")
        for name in names:
            if not isinstance(name, str) or not name:
                raise UsageError(f"keep={self.keep!r} is not allowed: {name!r} is not the name of a part.")
        return names

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values


REUSE_FIELDS = tuple(field.name for field in fields(Reuse))
