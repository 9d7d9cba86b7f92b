"""Checks that validate a setting. Each raises `UsageError` that quotes the value and says what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from toma_diffusion.errors import UsageError


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """`value` as a float, if it is a number for which the rule holds."""
    if not is_number(value) or not holds(value):
        raise UsageError(f"{name}={value!r} is not allowed: it must be {rule}.")
    return float(value)


def check_integer(name: str, value: object, *, minimum: int | None = None) -> int:
    """`value` as an int, if it is a whole number and not too small."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or (minimum is not None and value < minimum):  # type: ignore[operator]
        least = "" if minimum is None else f" of {minimum} or more"
        raise UsageError(f"{name}={value!r} is not allowed: it must be a whole number{least}.")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not allowed: it must be True or False.")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not known: {listed(allowed)}.{hint(value, allowed)}")


def check_sequence(name: str, value: object, rule: str) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise UsageError(f"{name}={value!r} must be a tuple: {rule}.")
    return tuple(value)


def check_indices(name: str, value: object, *, minimum: int | None = None) -> tuple[int, ...]:
    """`value` as a sorted tuple of block indices."""
    blocks = check_sequence(name, value, "block indices" if minimum is None else f"block indices of {minimum} or more")
    return tuple(sorted({check_integer(name, block, minimum=minimum) for block in blocks}))


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, for error messages."""
    return ", ".join(repr(name) for name in names)


def listed(names: Iterable[str]) -> str:
    return f"use one of {quoted(names)}"


def hint(value: object, names: Iterable[str]) -> str:
    """The known name nearest to a wrong one, for error messages."""
    near = difflib.get_close_matches(str(value), list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_known(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise for a name that is not a field of `owner`."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UsageError(f"{name!r} is not a field of {owner}: {listed(known)}.{hint(name, known)}")
