"""What to merge, how much and how often: one frozen, validated object, and the named presets."""

from __future__ import annotations

import difflib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

SELECTIONS = ("facility-location", "random", "strided", "none", "slice")
REGIONS = ("tile", "stripe", "global")
ASSIGNMENTS = ("local", "global")
UNMERGES = ("transpose", "pseudo-inverse")
SCOPES = ("module", "block", "stage")
SITES = ("attn", "cross_attn", "ff")
BACKENDS = ("auto", "torch", "triton")
Self = TypeVar("Self", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config(ABC):
    """What the settings of every method have in common. Immutable; a wrong value raises `ValueError` at once."""

    label: ClassVar[str]
    """The method's name, as its authors write it."""

    ratio: float = 0.5
    """Share of the tokens removed, 0 ≤ ratio < 1. Higher is faster and loses more detail; 0 changes nothing."""

    window: tuple[float, float] = (0.0, 1.0)
    """Share of the steps, from start (included) to end (excluded), in which merging happens. A narrower window is
    slower and keeps more detail; a later start helps most."""

    skip_blocks: tuple[int, ...] = ()
    """Indices of blocks to leave alone. More is slower and keeps more detail."""

    def __post_init__(self) -> None:
        self._set("ratio", check_number("ratio", self.ratio, "0 ≤ ratio < 1", lambda x: 0 <= x < 1))
        self._set("window", self._valid_window())
        self._set("skip_blocks", check_indices("skip_blocks", self.skip_blocks))

    @property
    def scope(self) -> str:
        """Where tokens are merged and unmerged: around each `module`, unless a method knows more."""
        return "module"

    @property
    def sites(self) -> tuple[str, ...]:
        """Which modules are merged: self-attention, unless a method knows more."""
        return ("attn",)

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Missing fields take their defaults, unknown ones raise `ValueError`."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a configuration must be a mapping of field names to values, not {values!r}.")
        cls._reject_unknown_fields(values)
        return cls(**values)

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """The inverse of `to_json`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} is not JSON ({error}); pass what {cls.__name__}.to_json() returned.") from error
        return cls.from_dict(values)

    @classmethod
    def knows(cls, name: str) -> bool:
        """Whether it has a field of that name."""
        return name in [field.name for field in fields(cls)]

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in the types that JSON knows (tuples become lists)."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @abstractmethod
    def describe(self) -> list[str]:
        """What is done, in lines for `summary()`."""

    @classmethod
    def _reject_unknown_fields(cls, values: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for name in values:
            if not cls.knows(name):
                raise ValueError(f"{name!r} is not a field of {cls.__name__}: {_listed(known)}.{_hint(name, known)}")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values

    def _valid_sites(self) -> tuple[str, ...]:
        sites = check_sequence("sites", self.sites, f"some of {_quoted(SITES)}")
        if not sites:
            raise ValueError(f"sites={self.sites!r} names no module: use some of {_quoted(SITES)}, or ratio=0.")
        for site in sites:
            check_one_of("sites", site, SITES)
        return tuple(site for site in SITES if site in sites)

    def _valid_window(self) -> tuple[float, float]:
        rule = "(start, end) with 0 ≤ start < end ≤ 1"
        window = check_sequence("window", self.window, rule)
        if not all(_is_number(share) for share in window) or len(window) != 2 or not 0 <= window[0] < window[1] <= 1:
            raise ValueError(f"window={self.window!r} is not allowed: it must be {rule}.")
        return float(window[0]), float(window[1])


@dataclass(frozen=True, kw_only=True)
class ToMAConfig(Config):
    """All settings of token merging by ToMA. Immutable; a wrong value raises `ValueError` at once.

    Example:

    ```python
    >>> from toma_diffusion import ToMAConfig
    >>> config = ToMAConfig(ratio=0.5, region="tile", num_regions=64)
    >>> ToMAConfig.from_json(config.to_json()) == config
    True
    >>> ToMAConfig.from_preset("toma-tile", ratio=0.75).num_regions
    256
    ```
    """

    label: ClassVar[str] = "ToMA"

    selection: str = "facility-location"
    """How destinations are chosen: `facility-location` (the paper's), `random` or `strided` (fixed, to compare
    against), `none`: neither destinations nor weights are computed, a fixed random projection stands in for them, or
    `slice`: nothing is merged at all, the first tokens are taken and the others dropped. The last two make noise of a
    picture; their time is the bound that no selection (`none`) and no merging whatever (`slice`) can beat."""

    region: str = "tile"
    """Shape of the regions inside which destinations are chosen: `tile` (rectangles, best quality), `stripe` (runs of
    the row-major sequence, no reshuffle) or `global` (one region, slowest to select in)."""

    num_regions: int = 64
    """How many regions to ask for. More is faster and keeps destinations closer to their tokens. The nearest number
    that divides the grid evenly is taken. `global` always has one."""

    assign: str = "local"
    """Which destinations a token may merge into: `local` (those of its own region; block-diagonal weights, cheap) or
    `global` (all of them; a full matrix, dearer)."""

    scale: float = 1000.0
    """Sharpness 1/τ of the softmax over destinations. Higher is closer to a hard assignment, lower blends more.
    `math.inf` (or `"inf"`) is the hard assignment: every token goes to its nearest destination alone. An index then
    takes the place of the weight matrix, which is faster, most of all with `assign="global"`."""

    unmerge: str = "transpose"
    """How the result is spread back: `transpose` (fast) or `pseudo-inverse` (least-squares exact, much slower)."""

    scope: str = "module"
    """Where to merge and unmerge: around each `module` (the paper's ToMA), around each `block` (ToMA*), or around a
    run of blocks, a `stage`. Wider is faster and loses more detail."""

    sites: tuple[str, ...] = SITES
    """Which modules to merge in `module` scope, out of `attn`, `cross_attn` and `ff`. More is faster."""

    min_tokens: int = 0
    """Grids of fewer tokens are left whole. In a small grid every token counts for much of the picture, and merging it
    saves little."""

    select_every: int = 10
    """Steps between two selections of destinations. Higher is faster; 1 selects in every step."""

    reweigh_every: int = 5
    """Steps between two computations of the merge weights. Higher is faster; a selection always reweighs."""

    num_plans: int = 1
    """How many plans the blocks of one kind (in `stage` scope: the runs of blocks) take in turn. With one, the paper's,
    a token that is merged away is merged away everywhere; with more, and `rotation` above 0, other tokens are
    destinations in the next block. Each plan is selected and weighed on its own, which costs time and memory."""

    rotation: float = 0.0
    """How strongly tokens are favoured that were not chosen lately: a token's gain is damped by exp(−rotation) for
    every time it was a destination before in this generation, in any plan of its kind. 0 looks at the tokens alone, as
    the paper does. `random` destinations are drawn anew for every plan and `strided` ones shifted by one token,
    whatever the rotation."""

    backend: str = "auto"
    """Which implementation of the operators runs: `torch`, `triton` (fused kernels, NVIDIA GPUs), or `auto` for the
    fastest one that the machine offers. Where `triton` cannot run, `torch` does, with a warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scale: object = self.scale
        scale = math.inf if scale == "inf" else scale
        self._set("scale", check_number("scale", scale, "a number above 0, or math.inf", lambda x: x > 0))
        self._set("rotation", check_number("rotation", self.rotation, "0 or more, and finite", _is_damping))
        for name in ("num_regions", "select_every", "reweigh_every", "num_plans"):
            self._set(name, check_integer(name, getattr(self, name), minimum=1))
        self._set("min_tokens", check_integer("min_tokens", self.min_tokens, minimum=0))
        for name, allowed in (
            ("selection", SELECTIONS),
            ("region", REGIONS),
            ("assign", ASSIGNMENTS),
            ("unmerge", UNMERGES),
            ("scope", SCOPES),
            ("backend", BACKENDS),
        ):
            check_one_of(name, getattr(self, name), allowed)
        self._set("sites", self._valid_sites())

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> ToMAConfig:
        """The preset `name` of `PRESETS`, with single fields replaced by `overrides`."""
        if name not in PRESETS:
            raise ValueError(f"preset={name!r} is not known: {_listed(PRESETS)}.{_hint(name, PRESETS)}")
        cls._reject_unknown_fields(overrides)
        return replace(PRESETS[name], **overrides)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in the types that JSON knows (tuples become lists, infinity "inf")."""
        plain = super().to_dict()
        return plain | {"scale": "inf"} if self.is_hard else plain

    @property
    def is_hard(self) -> bool:
        """Whether every token goes to one destination alone."""
        return math.isinf(self.scale)

    def describe(self) -> list[str]:
        """How tokens are chosen, and when."""
        told = [f"destinations by {self.selection}, {self.assign} assignment, unmerged by {self.unmerge}"]
        if self.min_tokens:
            told.append(f"grids of fewer than {self.min_tokens} tokens left whole")
        if self.num_plans > 1:
            told.append(f"{self.num_plans} plans in turn")
        if self.rotation and self.selection == "facility-location":
            told.append(f"destinations chosen before damped by exp(−{self.rotation:g})")
        elif self.rotation:
            told.append(f"rotation={self.rotation:g} without effect: {self.selection} does not look at earlier choices")
        told.append(f"selected every {_steps(self.select_every)}, reweighed every {_steps(self.reweigh_every)}")
        return told


def _is_damping(value: float) -> bool:
    return 0 <= value < math.inf


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_number(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """`value` as a float, if it is a number for which the rule holds."""
    if not _is_number(value) or not holds(value):
        raise ValueError(f"{name}={value!r} is not allowed: it must be {rule}.")
    return float(value)


def check_integer(name: str, value: object, *, minimum: int) -> int:
    """`value` as an int, if it is a whole number and not too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ValueError(f"{name}={value!r} is not allowed: it must be a whole number of {minimum} or more.")
    return int(value)


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise if `value` is none of the names allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: {_listed(allowed)}.{_hint(value, allowed)}")


def check_sequence(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """`value` as a tuple, if it is a tuple or a list."""
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name}={value!r} must be a tuple: {rule}.")
    return tuple(value)


def check_indices(name: str, value: object) -> tuple[int, ...]:
    """`value` as a sorted tuple of block indices."""
    blocks = check_sequence(name, value, "block indices of 0 or more")
    return tuple(sorted({check_integer(name, block, minimum=0) for block in blocks}))


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _listed(names: Iterable[str]) -> str:
    return f"use one of {_quoted(names)}"


def _hint(value: object, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value), list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


PRESETS: Mapping[str, ToMAConfig] = MappingProxyType(
    {
        "toma": ToMAConfig(region="tile", num_regions=64, assign="global", scale=math.inf, scope="module"),
        "toma-stripe": ToMAConfig(region="stripe", num_regions=64, assign="local", scope="module"),
        "toma-tile": ToMAConfig(region="tile", num_regions=256, assign="local", scope="module"),
        "toma-once": ToMAConfig(region="tile", num_regions=64, assign="local", scope="block"),
        "lower-bound": ToMAConfig(selection="none", region="tile", num_regions=64, assign="local", scope="module"),
        "floor": ToMAConfig(selection="slice", region="tile", num_regions=64, assign="local", scope="module"),
        "fast": ToMAConfig(region="tile", num_regions=64, assign="local", scope="stage"),
        "balanced": ToMAConfig(
            region="tile",
            num_regions=64,
            assign="local",
            scope="block",
            select_every=1,
            reweigh_every=1,
            window=(0.5, 1.0),
            min_tokens=512,
        ),
    }
)
"""The paper's variants by name, its lower bound, the floor below that, and ours: `fast`, and `balanced`, which stays
nearest to the picture without merging.

`balanced` leaves the first half of the steps whole, where the picture takes its shape, and small grids, and chooses
anew in every step, which small regions make cheap: on the bundled model the three that help most (docs/quality.md).

`toma` takes the limit of the paper's sharp softmax, a hard assignment: the patches of a photograph come back nearer to
themselves (40.9 against 37.2 dB at ratio 0.25, benchmarks/results/assignment.csv), and an index is faster than a matrix
over all tokens. The paper's own is `scale=1000`."""
