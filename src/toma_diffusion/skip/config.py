"""Settings of skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from toma_diffusion.checks import check_integer, check_known, check_sequence, is_number
from toma_diffusion.errors import UsageError
from toma_diffusion.skip.learned import Learned


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Which steps are computed. In the others the denoiser does not run: its output is predicted. Immutable.

    Example:

    ```python
    >>> from toma_diffusion import Skip
    >>> Skip(computed=0.4).count(20)
    8
    >>> Skip(computed=(1, 2))
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: computed=(1, 2) lacks step 0: nothing can be predicted in the first step.
    ```
    """

    computed: float | int | tuple[int, ...] = 0.5
    """What is computed: a share of the steps, such as 0.4; their number, such as 8; or the steps themselves, counted
    from 0, such as (0, 1, 2, 4, 7). A share or a number is spread by the noise levels of the scheduler. Fewer is faster
    and loses more detail."""

    learned: Learned | None = None
    """Which steps are computed, and the weights of the others, as they were learned on the model: see `handle.learn`.
    Can be given as the path of a file. None: both follow from the noise levels of the scheduler."""

    def __post_init__(self) -> None:
        self._set("computed", self._valid_computed())
        if self.learned is not None:
            self._set("learned", Learned.from_any(self.learned))
            self._check_learned(self.learned)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Skip:
        if not isinstance(values, Mapping):
            raise UsageError(f"skip={values!r} is not allowed: pass a Skip, or a mapping of its fields.")
        check_known(cls.__name__, values, [field.name for field in fields(cls)])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        computed = list(self.computed) if isinstance(self.computed, tuple) else self.computed
        return {"computed": computed, "learned": None if self.learned is None else self.learned.to_dict()}

    def count(self, num_steps: int) -> int:
        """How many of `num_steps` steps are computed. Of a share at least one is skipped."""
        if isinstance(self.computed, tuple):
            return sum(step < num_steps for step in self.computed)
        if isinstance(self.computed, int):
            return min(self.computed, num_steps)
        return max(1, min(round(self.computed * num_steps), num_steps - 1))

    def _valid_computed(self) -> float | int | tuple[int, ...]:
        given: Any = self.computed
        if is_number(given):
            if isinstance(given, Integral):
                return check_integer("computed", given, minimum=1)
            if 0 < given < 1:
                return float(given)
            raise UsageError(
                f"computed={given!r} is not allowed: a share of the steps is above 0 and below 1; a number of steps is "
                "a whole number."
            )
        steps = check_sequence("computed", given, "a share of the steps, their number, or the steps, counted from 0")
        steps = tuple(sorted({check_integer("computed", step, minimum=0) for step in steps}))
        if not steps or steps[0] != 0:
            raise UsageError(f"computed={given!r} lacks step 0: nothing can be predicted in the first step.")
        return steps

    def _check_learned(self, learned: Learned) -> None:
        found = learned.of(self.count(learned.num_steps))
        if isinstance(self.computed, tuple) and self.computed != found.computed:
            raise UsageError(
                f"computed={self.computed!r} cannot go with what was learned, which computes {found.computed!r}: set "
                f"computed={found.count}."
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values


BySteps = Callable[["int | None"], "Skip | None"]
"""What is skipped in a generation of so many steps, if anything. None: their number is not known."""


@dataclass(frozen=True)
class AfterLearning:
    """As it was learned, in generations of so many steps as it was learned from; in others as before."""

    skip: Skip
    before: BySteps

    def __call__(self, num_steps: int | None) -> Skip | None:
        learned = self.skip.learned
        return self.skip if learned is None or num_steps == learned.num_steps else self.before(num_steps)


@dataclass(frozen=True)
class Always:
    """The same for any number of steps."""

    skip: Skip

    def __call__(self, num_steps: int | None) -> Skip:
        return self.skip
