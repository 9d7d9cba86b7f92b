"""Settings of ToDo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toma_diffusion.checks import check_integer, check_sequence
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Merging

LARGEST_FACTOR = 8
TOLERANCE = 1e-3
"""Allows 1 − 1/9 to be written as 0.889."""


@dataclass(frozen=True, kw_only=True)
class ToDoConfig(Merging):
    """Settings of ToDo. Immutable; a wrong value raises `UsageError` at once.

    In self-attention, queries are computed from all tokens, keys and values only from every n-th row and column of the
    grid. Nothing is merged, so nothing has to be restored.

    Keys must be computed from other tokens than queries, which is possible in UNets and PixArt. Flux and SD3 attend to
    text and image jointly, with queries and keys from the same tokens; there it raises an error.

    Example:

    ```python
    >>> from toma_diffusion import ToDoConfig
    >>> ToDoConfig(ratio=0.75, deeper_factors=(2,)).factors
    (2, 2)
    >>> ToDoConfig(ratio=0.5)
    Traceback (most recent call last):
    toma_diffusion.errors.UsageError: ratio=0.5 is not allowed: every n-th row and column stays, so it must be ...
    ```
    """

    label: ClassVar[str] = "ToDo"

    ratio: float = 0.75
    """Fraction of keys and values removed at the first level that has attention: 0.75 keeps every 2nd row and column,
    0.8889 every 3rd, 0.9375 every 4th. Higher is faster and loses more detail."""

    deeper_factors: tuple[int, ...] = ()
    """The same for the levels below, as factors: (2,) keeps every 2nd row and column at the next level too. The
    authors do not reduce those levels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        factors = check_sequence("deeper_factors", self.deeper_factors, "a whole number for each level")
        self._set("deeper_factors", tuple(check_integer("deeper_factors", each, minimum=1) for each in factors))
        factor = factor_of(self.ratio)
        if factor is None:
            raise UsageError(
                f"ratio={self.ratio:g} is not allowed: every n-th row and column stays, so it must be 0.75, 0.8889, "
                "0.9375, …, or 0."
            )
        self._set("ratio", 1 - 1 / factor**2)

    @property
    def factors(self) -> tuple[int, ...]:
        """By level, from the first that has attention."""
        return (factor_of(self.ratio) or 1, *self.deeper_factors)


def factor_of(ratio: float) -> int | None:
    """The n with ratio = 1 − 1/n², if there is one."""
    return next((n for n in range(1, LARGEST_FACTOR + 1) if abs(1 - 1 / n**2 - ratio) < TOLERANCE), None)
