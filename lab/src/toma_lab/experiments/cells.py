"""A method with its settings: as a user writes it, and as it is applied to a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from toma_diffusion.api import apply_toma
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Config
from toma_diffusion.others import METHODS, named_config
from toma_diffusion.skip.config import Skip
from toma_lab.experiments.parsing import parse_settings
from toma_lab.experiments.shortcuts import Shortcut

COLUMNS_OF_THEIR_OWN = ("ratio", "scope", "assign")
"""Settings with a column of their own. The others are in the column `settings`."""
LEARNED = "learned"
"""What was learned on the model: a file in what a user writes, which is in no title and no row; in a configuration the
weights themselves."""


@dataclass(frozen=True)
class MethodSpec:
    """A preset or another method, and the fields to change in it."""

    preset: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """`toma`, `fast:computed=10`, `fast:learned=learned.json`, or `tomesd:max_downsample=2`."""
        preset, _, changes = text.strip().partition(":")
        overrides = parse_settings(text, changes)
        config = named_config(preset, overrides)  # raises, with the field and what is allowed, if anything is wrong
        if "ratio" in overrides and config.skip is None:
            raise UsageError(
                f"method {text!r} sets the ratio, which has an option of its own: leave it out of the settings."
            )
        return cls(preset, tuple(overrides.items()))

    def possible(self, ratios: Iterable[float]) -> list[float]:
        """Those of the ratios that it can have. ToMA can have any, other methods cannot. What skips steps has the ratio
        of its preset, or of its settings."""
        config = named_config(self.preset, dict(self.overrides))
        if config.skip is not None:
            return [config.ratio]
        return [ratio for ratio in ratios if self.preset not in METHODS or self._allows(ratio)]

    def impossible(self, ratios: Iterable[float]) -> list[str]:
        """A sentence for each of the ratios that it cannot have."""
        wanted = list(ratios)
        beyond = sorted(set(wanted) - set(self.possible(wanted)))
        config = named_config(self.preset, dict(self.overrides))
        if config.skip is None:
            return [f"{self.preset} cannot have ratio {ratio:g}." for ratio in beyond]
        return [
            f"ratio {ratio:g} of {self.preset}: what skips steps has the ratio of its settings, here "
            f"{config.ratio:g}. Set it there: {self.preset}:ratio={ratio:g}."
            for ratio in beyond
        ]

    def _allows(self, ratio: float) -> bool:
        try:
            named_config(self.preset, dict(self.overrides) | {"ratio": ratio})
        except UsageError:
            return False
        return True


@dataclass(frozen=True)
class Cell:
    """A method with all its settings. One measurement."""

    method: str
    config: Config | None = None
    """As it is applied; None for the baseline."""
    overrides: tuple[str, ...] = ()
    """Fields that the user set, recorded even if they have their default value."""
    shortcut: Shortcut | None = None
    """Another way to save time, in place of a configuration."""

    @property
    def is_cached(self) -> bool:
        """Whether a cache decides while the model runs what is computed."""
        return self.shortcut is not None and self.shortcut.is_cache

    @property
    def settings(self) -> str:
        """What the user set and what differs from the defaults, unless it has a column of its own; compact JSON."""
        if self.shortcut is not None:
            return json.dumps(self.shortcut.settings, separators=(",", ":"))
        if self.config is None:
            return "{}"
        values, defaults = self.config.to_dict(), type(self.config)().to_dict()
        if values["skip"] is not None:
            usual = Skip().to_dict()
            values["skip"] = {
                name: True if name == LEARNED else value  # hundreds of weights
                for name, value in values["skip"].items()
                if name == "computed" or value != usual[name]
            }
        noted = {
            name: value
            for name, value in sorted(values.items())
            if name not in COLUMNS_OF_THEIR_OWN and (value != defaults[name] or name in self.overrides)
        }
        return json.dumps(noted, separators=(",", ":"))

    @property
    def key(self) -> dict[str, str]:
        """The columns that distinguish it from the other cells of its group."""
        scope, ratio = ("", "") if self.config is None else (self.config.scope, f"{self.config.ratio:g}")
        assign = "" if self.config is None else self.config.assign
        return {"method": self.method, "settings": self.settings, "scope": scope, "assign": assign, "ratio": ratio}


def cells_of(
    model: Any, methods: Iterable[MethodSpec], ratios: Iterable[float], scopes: Iterable[str] = ()
) -> list[Cell]:
    """Every method at every ratio, with the settings that `apply_toma` uses for this model.

    Scopes are for ToMA only. Ratios that a method cannot have are left out.
    """
    ratios, scopes = list(ratios), list(scopes)
    cells: dict[Cell, None] = {}
    for method in methods:
        for chosen in [{"scope": scope} for scope in scopes if method.preset not in METHODS] or [{}]:
            for ratio in method.possible(ratios) or ratios:  # if none is, the error says why
                overrides = dict(method.overrides) | chosen
                with apply_toma(model, method.preset, **overrides | {"ratio": ratio}) as handle:
                    cells[Cell(method.preset, handle.summary().config, tuple(overrides))] = None
    return list(cells)
