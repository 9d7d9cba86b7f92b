"""What is to be timed: methods, cells (a method with its settings) and groups (cells that share one baseline)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.api import apply_toma
from toma_diffusion.baselines import METHODS, named_config
from toma_diffusion.bench.timing import Host
from toma_diffusion.config import Config, ToMAConfig

MODES = ("eager", "compiled", "graph")
COMPILES = ("none", "block", "whole")
BASELINE, LOWER_BOUND, FLOOR = "baseline", "lower-bound", "floor"
COLUMNS_OF_THEIR_OWN = ("ratio", "scope", "assign")
"""Settings that have a column in the rows; the others are noted together."""
DEFAULTS = ToMAConfig()


@dataclass(frozen=True)
class Resolution:
    """Size of the image in pixels."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str, multiple: int) -> Resolution:
        """`1024`, or `1024x768` for width × height."""
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
        sides = [int(side) for side in match.groups() if side] if match else []
        if not sides or any(side == 0 or side % multiple for side in sides):
            raise ValueError(
                f"resolution {text!r} is not allowed: give 1024 or, width × height, 1024x768, "
                f"in multiples of {multiple} for this model."
            )
        return cls(sides[0], sides[-1])

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Method:
    """A preset or another method, and the fields to change in it."""

    preset: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Method:
        """`toma`, or `fast:num_regions=256;scope=block`, or `tomesd:max_downsample=2`."""
        preset, _, changes = text.strip().partition(":")
        overrides = {}
        for change in filter(None, (part.strip() for part in changes.split(";"))):
            name, equals, value = change.partition("=")
            if not equals:
                raise ValueError(f"method {text!r}: {change!r} is not a setting; write name=value, separated by ';'.")
            overrides[name.strip()] = parse_value(value.strip())
        if "ratio" in overrides:
            raise ValueError(
                f"method {text!r} sets the ratio, which has an option of its own: leave it out of the settings."
            )
        named_config(preset, overrides)  # raises, with the field and what is allowed, if anything is wrong
        return cls(preset, tuple(overrides.items()))

    def possible(self, ratios: Iterable[float]) -> list[float]:
        """The ratios that it can have: ToMA any, others not."""
        return [ratio for ratio in ratios if self.preset not in METHODS or self._allows(ratio)]

    def _allows(self, ratio: float) -> bool:
        try:
            named_config(self.preset, dict(self.overrides) | {"ratio": ratio})
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Cell:
    """One measurement of a group: a method with all its settings."""

    method: str
    config: Config | None = None
    """As it is applied; None for the baseline."""
    overrides: tuple[str, ...] = ()
    """Fields that the user set, noted even where they have their default value."""

    @property
    def settings(self) -> str:
        """What the user set and what differs from the defaults, unless it has a column of its own; compact JSON."""
        if self.config is None:
            return "{}"
        values, defaults = self.config.to_dict(), type(self.config)().to_dict()
        noted = {
            name: value
            for name, value in sorted(values.items())
            if name not in COLUMNS_OF_THEIR_OWN and (value != defaults[name] or name in self.overrides)
        }
        return json.dumps(noted, separators=(",", ":"))

    @property
    def key(self) -> dict[str, str]:
        """The columns that tell it from the other cells of its group."""
        scope, ratio = ("", "") if self.config is None else (self.config.scope, f"{self.config.ratio:g}")
        assign = self.config.assign if isinstance(self.config, ToMAConfig) else ""
        return {"method": self.method, "settings": self.settings, "scope": scope, "assign": assign, "ratio": ratio}


@dataclass(frozen=True)
class Comparison:
    """A method, and the two cells that bound its time from below."""

    cell: Cell
    lower_bound: Cell | None = None
    """The same with fixed random projections: nothing is selected or weighed."""
    floor: Cell | None = None
    """The same with tokens sliced away: nothing is merged either."""

    @property
    def references(self) -> list[Cell]:
        """The bounds that it has."""
        return [cell for cell in (self.lower_bound, self.floor) if cell is not None]


@dataclass(frozen=True)
class Group:
    """Everything that a method shares with the baseline it is compared with."""

    model: str
    resolution: Resolution
    batch: int
    mode: str
    compile: str
    steps: int
    cache: float | None
    dtype: str

    @property
    def key(self) -> dict[str, str]:
        """The columns that tell it from other groups."""
        cache = "" if self.cache is None else f"{self.cache:g}"
        return {name: str(value) for name, value in vars(self).items()} | {"cache": cache}

    def __str__(self) -> str:
        how = self.mode if self.compile == "none" else f"{self.mode}, compiled by {self.compile}"
        if self.mode == "compiled":
            how = "the whole compiled" if self.compile == "whole" else "compiled block by block"
        cached = "" if self.cache is None else f", first-block cache {self.cache:g}"
        return f"{self.model}, {self.resolution}, batch {self.batch}, {self.dtype}, {self.steps} steps, {how}{cached}"


def split_list(text: str) -> list[str]:
    """The items of a list separated by commas; commas in parentheses belong to their item."""
    return [item.strip() for item in re.split(r",(?![^(]*\))", text) if item.strip()]


def parse_value(text: str) -> Any:
    """A number, a tuple in parentheses, or else the text itself."""
    if text.startswith("(") and text.endswith(")"):
        return tuple(parse_value(item) for item in split_list(text[1:-1]))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def compare(
    model: Any, methods: Iterable[Method], ratios: Iterable[float], scopes: Iterable[str], *, bounds: Iterable[str]
) -> list[Comparison]:
    """All cells but the baseline. The settings are those that `apply_toma` arrives at for this model.

    Scopes are a matter of ToMA. A method that cannot have some of the ratios is measured at the others.
    """
    ratios, scopes, wanted = list(ratios), list(scopes), set(bounds)
    comparisons: dict[Cell, Comparison] = {}
    for method in methods:
        for chosen in [{"scope": scope} for scope in scopes if method.preset not in METHODS] or [{}]:
            for ratio in method.possible(ratios) or ratios:  # if none is, the error says why
                overrides = dict(method.overrides) | chosen
                with apply_toma(Host(model), method.preset, ratio=ratio, **overrides) as handle:
                    config = handle.summary().config
                cell = Cell(method.preset, config, tuple(overrides))
                lower_bound, floor = bounds_of(config)
                comparisons[cell] = Comparison(
                    cell, lower_bound if LOWER_BOUND in wanted else None, floor if FLOOR in wanted else None
                )
    return list(comparisons.values())


def bounds_of(config: Config) -> tuple[Cell | None, Cell | None]:
    """The lower bound and the floor of a method. What makes no difference to them is left at its default, so that
    methods share them. Other methods than ToMA have none."""
    if not isinstance(config, ToMAConfig) or config.selection == "slice":
        return None, None
    floor = ToMAConfig.from_preset(
        FLOOR,
        ratio=config.ratio,
        scope=config.scope,
        sites=config.sites,
        window=config.window,
        min_tokens=config.min_tokens,
        skip_blocks=config.skip_blocks,
    )
    lower_bound = replace(
        config,
        selection="none",
        select_every=DEFAULTS.select_every,
        reweigh_every=DEFAULTS.reweigh_every,
        rotation=DEFAULTS.rotation,
    )
    return None if config.selection == "none" else Cell(LOWER_BOUND, lower_bound), Cell(FLOOR, floor)


@dataclass(frozen=True)
class Scenario:
    """All that one run of the benchmark is asked for, but the model."""

    methods: tuple[Method, ...]
    ratios: tuple[float, ...]
    scopes: tuple[str, ...]
    resolutions: tuple[Resolution, ...]
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    compile: str
    steps: int
    repeats: int
    bounds: tuple[str, ...]
    """Which of `lower-bound` and `floor` are measured beside every method."""
    pipeline: bool
    cache: float | None

    def __post_init__(self) -> None:
        for mode in self.modes:
            _one_of("mode", mode, MODES)
        _one_of("compile", self.compile, COMPILES)
        for bound in self.bounds:
            _one_of("bound", bound, (LOWER_BOUND, FLOOR))
        if "compiled" in self.modes and self.compile == "none":
            raise ValueError("mode 'compiled' needs --compile block or --compile whole, not 'none'.")
        for name, value in (("steps", self.steps), ("repeats", self.repeats), *(("batch", b) for b in self.batches)):
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed: it must be 1 or more.")
        if self.cache is not None and "graph" in self.modes:
            raise ValueError(
                f"--cache {self.cache:g} decides in every step what to run, which mode 'graph' cannot follow."
            )
        if self.cache is not None and self.compile == "whole" and "compiled" in self.modes:
            raise ValueError(f"--cache {self.cache:g} decides between blocks: use --compile block, not 'whole'.")

    def groups(self, model: str, dtype: str) -> list[Group]:
        """One for each resolution, batch and mode."""
        return [
            Group(
                model,
                resolution,
                batch,
                mode,
                "none" if mode == "eager" else self.compile,
                self.steps,
                self.cache,
                dtype,
            )
            for resolution in self.resolutions
            for batch in self.batches
            for mode in self.modes
        ]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not known: use one of {', '.join(allowed)}.")
