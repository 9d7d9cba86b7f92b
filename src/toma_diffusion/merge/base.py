"""What the settings of all methods that merge tokens share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from toma_diffusion.checks import (
    check_indices,
    check_known,
    check_number,
    check_one_of,
    check_sequence,
    is_number,
    quoted,
)
from toma_diffusion.errors import UsageError

SITES = ("attn", "cross_attn", "ff")
Self = TypeVar("Self", bound="Merging")


@dataclass(frozen=True, kw_only=True)
class Merging(ABC):
    """Settings that all methods have. Immutable; a wrong value raises `UsageError` at once."""

    label: ClassVar[str]
    """The method's name, as its authors write it."""

    ratio: float = 0.5
    """Fraction of the tokens removed, 0 < ratio < 1. Higher is faster and loses more detail."""

    window: tuple[float, float] = (0.0, 1.0)
    """Start (included) and end (excluded) of the steps in which tokens are merged, as fractions of all steps. A
    narrower window is slower and keeps more detail; a later start helps most."""

    skip_blocks: tuple[int, ...] | None = None
    """Indices of blocks that are not merged; negative ones count from the end, -1 is the last block. More is slower and
    keeps more detail; the last block matters most. None: the default of the model family, which `summary()` says."""

    def __post_init__(self) -> None:
        self._set("ratio", self._valid_ratio())
        self._set("window", self._valid_window())
        if self.skip_blocks is not None:
            self._set("skip_blocks", check_indices("skip_blocks", self.skip_blocks))

    # These are read from all settings. Methods where the user can choose override them with a field.

    @property
    def scope(self) -> str:
        """Where tokens are merged and unmerged. Defaults to `module`."""
        return "module"

    @property
    def merged_sites(self) -> tuple[str, ...]:
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
    def reweighed_every(self) -> int:
        """Steps between two computations of the merge weights. Defaults to 1."""
        return 1

    @property
    def guidance_parts(self) -> int | str:
        """Which samples share one plan. Defaults to 1: every sample has its own."""
        return 1

    @property
    def skips_last_block(self) -> bool:
        """Whether the last block is left whole where a model family has no default of its own."""
        return False

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        if not isinstance(values, Mapping):
            raise UsageError(f"settings must be a mapping of field names to values, not {values!r}.")
        check_known(cls.__name__, values, cls.names())
        return cls(**values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has: tuples become lists."""
        values = {name: getattr(self, name) for name in self.names()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def changed(self: Self, changes: Mapping[str, Any]) -> Self:
        return self.from_dict(self.to_dict() | dict(changes))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values

    def _valid_ratio(self) -> float:
        if is_number(self.ratio) and self.ratio == 0:
            raise UsageError("ratio=0 merges nothing: give the fraction of the tokens to remove, or merge nothing.")
        return check_number("ratio", self.ratio, "0 < ratio < 1", lambda x: 0 < x < 1)

    def _valid_sites(self, sites: Any) -> tuple[str, ...]:
        sites = check_sequence("sites", sites, f"some of {quoted(SITES)}")
        if not sites:
            raise UsageError(f"sites={sites!r} names no module: use some of {quoted(SITES)}.")
        for site in sites:
            check_one_of("sites", site, SITES)
        return tuple(site for site in SITES if site in sites)

    def _valid_window(self) -> tuple[float, float]:
        rule = "(start, end) with 0 ≤ start < end ≤ 1"
        window = check_sequence("window", self.window, rule)
        if not all(is_number(share) for share in window) or len(window) != 2 or not 0 <= window[0] < window[1] <= 1:
            raise UsageError(f"window={self.window!r} is not allowed: it must be {rule}.")
        return float(window[0]), float(window[1])
