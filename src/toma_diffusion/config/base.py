"""What the settings of all methods share, and the checks that validate a setting."""

from __future__ import annotations

import difflib
import json
from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from toma_diffusion.errors import UsageError

SITES = ("attn", "cross_attn", "ff")
Self = TypeVar("Self", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config(ABC):
    """Settings that all methods have. Immutable; a wrong value raises `UsageError` at once."""

    label: ClassVar[str]
    """The method's name, as its authors write it."""

    ratio: float = 0.5
    """Fraction of the tokens removed, 0 ≤ ratio < 1. Higher is faster and loses more detail; 0 changes nothing."""

    window: tuple[float, float] = (0.0, 1.0)
    """Start (included) and end (excluded) of the steps in which tokens are merged, as fractions of all steps. A
    narrower window is slower and keeps more detail; a later start helps most."""

    skip_blocks: tuple[int, ...] = ()
    """Indices of blocks that are not merged; negative ones count from the end, -1 is the last block. More is slower and
    keeps more detail; the last block matters most."""

    def __post_init__(self) -> None:
        self._set("ratio", check_number("ratio", self.ratio, "0 ≤ ratio < 1", lambda x: 0 <= x < 1))
        self._set("window", self._valid_window())
        self._set("skip_blocks", check_indices("skip_blocks", self.skip_blocks))

    # These are read from every configuration. Methods where the user can choose override them with a field.

    @property
    def scope(self) -> str:
        """Where tokens are merged and unmerged. Defaults to `module`; subclasses may override."""
        return "module"

    @property
    def sites(self) -> tuple[str, ...]:
        """Which modules are merged. Defaults to self-attention only."""
        return ("attn",)

    @property
    def assign(self) -> str:
        """Which destinations a token may merge into. Empty for methods that do not have the choice."""
        return ""

    @property
    def select_every(self) -> int:
        """Steps between two selections of destinations. Defaults to 1: selected in every step."""
        return 1

    @property
    def reweigh_every(self) -> int:
        """Steps between two computations of the merge weights. Defaults to 1."""
        return 1

    @property
    def guidance_parts(self) -> int | str:
        """Which samples share one plan. Defaults to 1: every sample has its own."""
        return 1

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Missing fields take their defaults, unknown ones raise `UsageError`."""
        if not isinstance(values, Mapping):
            raise UsageError(f"a configuration must be a mapping of field names to values, not {values!r}.")
        cls._reject_unknown_fields(values)
        return cls(**values)

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{text!r} is not JSON ({error}); pass what {cls.__name__}.to_json() returned.") from error
        return cls.from_dict(values)

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether it has a field of that name."""
        return name in [field.name for field in fields(cls)]

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has (tuples become lists)."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def _reject_unknown_fields(cls, values: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for name in values:
            if not cls.knows(name):
                raise UsageError(f"{name!r} is not a field of {cls.__name__}: {listed(known)}.{hint(name, known)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values

    def _valid_sites(self) -> tuple[str, ...]:
        sites = check_sequence("sites", self.sites, f"some of {quoted(SITES)}")
        if not sites:
            raise UsageError(f"sites={self.sites!r} names no module: use some of {quoted(SITES)}, or ratio=0.")
        for site in sites:
            check_one_of("sites", site, SITES)
        return tuple(site for site in SITES if site in sites)

    def _valid_window(self) -> tuple[float, float]:
        rule = "(start, end) with 0 ≤ start < end ≤ 1"
        window = check_sequence("window", self.window, rule)
        if not all(is_number(share) for share in window) or len(window) != 2 or not 0 <= window[0] < window[1] <= 1:
            raise UsageError(f"window={self.window!r} is not allowed: it must be {rule}.")
        return float(window[0]), float(window[1])


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are not."""
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
    """Raise if `value` is not True or False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} is not allowed: it must be True or False.")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise if `value` is none of the names allowed."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not known: {listed(allowed)}.{hint(value, allowed)}")


def check_sequence(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """`value` as a tuple, if it is a tuple or a list."""
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
    """`use one of …`, for error messages."""
    return f"use one of {quoted(names)}"


def hint(value: object, names: Iterable[str]) -> str:
    """The known name nearest to a wrong one, for error messages."""
    near = difflib.get_close_matches(str(value), list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
