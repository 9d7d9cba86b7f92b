"""What the settings of all methods share."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from toma_diffusion.checks import (
    check_indices,
    check_integer,
    check_known,
    check_number,
    check_one_of,
    check_sequence,
    is_number,
    quoted,
)
from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import SKIP_FIELDS, Skip

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

    max_steps: int | None = None
    """In generations of more steps no tokens are merged. None: in all they are. For presets that merge tokens where
    there are few steps, and skip steps where there are many."""

    skip: Skip | None = None
    """Which steps are skipped: the denoiser does not run in them, and its output is predicted. None: none is. Its
    fields can be written like those of the configuration itself: `apply_toma(pipe, "fast", computed=10)`."""

    def __post_init__(self) -> None:
        self._set("ratio", check_number("ratio", self.ratio, "0 ≤ ratio < 1", lambda x: 0 <= x < 1))
        self._set("window", self._valid_window())
        self._set("skip_blocks", check_indices("skip_blocks", self.skip_blocks))
        if self.max_steps is not None:
            self._set("max_steps", check_integer("max_steps", self.max_steps, minimum=1))
        if self.skip is not None and not isinstance(self.skip, Skip):
            self._set("skip", Skip.from_dict(self.skip))

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
        check_known(cls.__name__, values, cls.names())
        return cls(**_nested(values))

    def changed(self: Self, changes: Mapping[str, Any]) -> Self:
        """The same with other values of some fields, also of those of `skip`."""
        check_known(type(self).__name__, changes, self.names())
        return self.from_dict(self.to_dict() | {**changes})

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{text!r} is not JSON ({error}); pass what {cls.__name__}.to_json() returned.") from error
        return cls.from_dict(values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All fields, with those of `skip`."""
        return (*(field.name for field in fields(cls)), *SKIP_FIELDS)

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether it has a field of that name."""
        return name in cls.names()

    def value_of(self, name: str) -> Any:
        """The value of a field, also of one of `skip`, in types that JSON has."""
        values = self.to_dict()
        return values[name] if name in values else (values["skip"] or {}).get(name)

    @property
    def shows_ratio(self) -> bool:
        """Whether the ratio says much about it: not if it merges nothing, or only where there are few steps."""
        return self.skip is None or (self.ratio > 0 and self.max_steps is None)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has (tuples become lists)."""
        own = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return own | {"skip": None if self.skip is None else self.skip.to_dict()}

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

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


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with fields of `skip` put where they belong."""
    own = {name: value for name, value in values.items() if name not in SKIP_FIELDS}
    inner = {name: value for name, value in values.items() if name in SKIP_FIELDS}
    if inner:
        given = own.get("skip") or {}
        given = given.to_dict() if isinstance(given, Skip) else dict(given)
        if "computed" in inner:  # what a preset says of its own share does not count for another
            given = {name: given[name] for name in given if name not in ("fewest", "learned")}
        own["skip"] = Skip.from_dict(given | inner)
    return own


def _plain(value: Any) -> Any:
    """Tuples become lists."""
    return list(value) if isinstance(value, tuple) else value
