"""The library in a column: a preset or another method, with its settings. The only file here that knows its API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.api import apply_toma
from toma_diffusion.errors import UsageError
from toma_diffusion.families import find_adapter
from toma_diffusion.merge.base import Config
from toma_diffusion.merge.schedule import Schedule
from toma_diffusion.others import METHODS, config_class, method_of, named_config
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.schedule import computed_steps
from toma_lab.parsing import parse_settings

COLUMNS_OF_THEIR_OWN = ("ratio", "scope", "assign")
"""Settings with a cell of their own in a row. The others are in the cell `settings`."""
LEARNED = "learned"
"""What was learned on the model: a file in what a user writes, which is in no title and no row; in a configuration the
weights themselves."""


@dataclass(frozen=True)
class OurSpec:
    """A preset or another method, and the fields to change in it, as a user writes them."""

    name: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> OurSpec:
        """`toma`, `fast:computed=10`, `fast:learned=learned.json`, or `tomesd:max_downsample=2`."""
        name, _, changes = text.strip().partition(":")
        overrides = parse_settings(text, changes)
        config = named_config(name, overrides)  # raises, with the field and what is allowed, if anything is wrong
        if "ratio" in overrides and config.skip is None:
            raise UsageError(
                f"method {text!r} sets the ratio, which has an option of its own: leave it out of the settings."
            )
        return cls(name, tuple(overrides.items()))

    @property
    def config(self) -> Config:
        """Its settings, without the defaults of a model family."""
        return named_config(self.name, dict(self.overrides))

    @property
    def shows_ratio(self) -> bool:
        """Whether it merges tokens at any number of steps."""
        return self.config.shows_ratio

    def knows(self, field: str) -> bool:
        """Whether it has a field of that name."""
        return config_class(self.name).knows(field)

    def possible(self, ratios: Iterable[float]) -> list[float]:
        """Those of the ratios that it can have. ToMA can have any, other methods cannot. What skips steps has the ratio
        of its preset, or of its settings."""
        if self.config.skip is not None:
            return [self.config.ratio]
        return [ratio for ratio in ratios if self.name not in METHODS or self._allows(ratio)]

    def impossible(self, ratios: Iterable[float]) -> list[str]:
        """A sentence for each of the ratios that it cannot have."""
        wanted = list(ratios)
        beyond = sorted(set(wanted) - set(self.possible(wanted)))
        if self.config.skip is None:
            return [f"{self.name} cannot have ratio {ratio:g}." for ratio in beyond]
        return [
            f"ratio {ratio:g} of {self.name}: what skips steps has the ratio of its settings, here "
            f"{self.config.ratio:g}. Set it there: {self.name}:ratio={ratio:g}."
            for ratio in beyond
        ]

    def on(
        self, model: Any, ratios: Iterable[float], scopes: Iterable[str] = ()
    ) -> list[tuple[Config, tuple[str, ...]]]:
        """The settings that `apply_toma` uses for this model at every ratio, and which of them the user set.

        Scopes are for ToMA only. Ratios that it cannot have are left out.
        """
        ratios = list(ratios)
        found = []
        for scope in [{"scope": scope} for scope in scopes if self.name not in METHODS] or [{}]:
            for ratio in self.possible(ratios) or ratios:  # if none is, the error says why
                overrides = dict(self.overrides) | scope
                with apply_toma(model, self.name, **overrides | {"ratio": ratio}) as handle:
                    found.append((handle.summary().config, tuple(overrides)))
        return found

    def _allows(self, ratio: float) -> bool:
        try:
            named_config(self.name, dict(self.overrides) | {"ratio": ratio})
        except UsageError:
            return False
        return True


def cells_of(config: Config | None, overrides: Iterable[str]) -> dict[str, str]:
    """The cells of a row that settings decide."""
    if config is None:
        return {"settings": "{}", "scope": "", "assign": "", "ratio": ""}
    values, defaults = config.to_dict(), type(config)().to_dict()
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
        if name not in COLUMNS_OF_THEIR_OWN and (value != defaults[name] or name in overrides)
    }
    settings = json.dumps(noted, separators=(",", ":"))
    return {"settings": settings, "scope": config.scope, "assign": config.assign, "ratio": f"{config.ratio:g}"}


def from_dict(name: str, values: Mapping[str, Any]) -> Config:
    """The settings of a preset or method, from `to_dict`."""
    return config_class(name).from_dict(values)


def merges(config: Config | None, steps: int) -> bool:
    """Whether tokens are merged in generations of so many steps."""
    return config is not None and config.ratio > 0 and (config.max_steps is None or steps <= config.max_steps)


def skips(config: Config | None, steps: int) -> bool:
    """Whether any of so many steps is skipped."""
    return config is not None and config.skip is not None and config.skip.count(steps) < steps


def computed_of(config: Config | None, steps: int) -> tuple[int, ...]:
    """Which of so many steps are computed, as far as it can be told without the scheduler."""
    return tuple(range(steps)) if config is None or config.skip is None else computed_steps(config.skip, steps)


def count_merged(config: Config, steps: int) -> int:
    """In how many of the computed steps tokens are merged."""
    if not config.ratio:
        return 0
    schedule = Schedule.from_config(config)
    return sum(schedule.action(step, steps) is not None for step in computed_of(config, steps))


def identity(config: Config, steps: int, computed: tuple[int, ...] | None = None) -> str:
    """What settings do in so many steps: of two that are equal one is enough. Raises `UsageError` if it is nothing.

    Args:
        computed: the steps that were computed, if they are known: noise levels decide it, unless they are listed.
    """
    if not merges(config, steps) and not skips(config, steps):
        raise UsageError(f"nothing is merged or skipped in a generation of {steps} steps.")
    if config.skip is not None:
        given = config.skip.computed if isinstance(config.skip.computed, tuple) else config.skip.count(steps)
        config = replace(config, skip=replace(config.skip, computed=computed or given, fewest=1, min_steps=1))
    return f"{type(config).__name__} {config.to_json()}"


def with_computed(config: Config, computed: tuple[int, ...]) -> Config:
    """The same with these computed steps, for which nothing was learned."""
    return config.changed({"computed": computed})


REPLACED = ("computed", "fewest", LEARNED)
"""Fields that a list of computed steps takes the place of."""


def as_used(config: Config | None) -> Config | None:
    """With what was learned for its own number of computed steps, without that for others."""
    skip = None if config is None else config.skip
    if config is None or skip is None or skip.learned is None:
        return config
    used = replace(skip.learned, steps=(skip.learned.of(skip.count(skip.learned.num_steps)),))
    return replace(config, skip=replace(skip, learned=used))


def check_learned(config: Config | None, steps: int) -> None:
    """Raise `UsageError` if what was learned is not for so many steps."""
    learned = None if config is None or config.skip is None else config.skip.learned
    if learned is not None and learned.num_steps != steps:
        raise UsageError(f"it was learned with {learned.num_steps} steps, and this run has {steps}.")


def shares_positions(model: Any) -> bool:
    """Whether all samples have one table of positions, as in Flux: they then share their destinations."""
    adapter = find_adapter(model)
    return adapter is not None and adapter.is_joint(model)


def count_blocks(model: Any) -> int:
    """Transformer blocks of a model."""
    adapter = find_adapter(model)
    return len(adapter.blocks(model)) if adapter else 0


def in_sentences(config: Config | None, steps: int) -> list[str]:
    """What settings do in so many steps, in words."""
    sentences = []
    if config is not None and merges(config, steps):
        sentences += [f"{line[:1].upper()}{line[1:].rstrip('.')}." for line in _merging(config)]
    if config is not None and config.skip is not None and skips(config, steps):
        sentences.append(_computed(config.skip, steps))
        weights = "" if config.skip.learned is None else ", with weights that were learned on the model"
        sentences.append(f"In the others the model does not run: its output is predicted{weights}.")
    return sentences


def _computed(skip: Skip, steps: int) -> str:
    count = f"{skip.count(steps)} of {steps} steps are computed"
    if skip.learned is None and not isinstance(skip.computed, tuple):
        return f"{count}, spread by the noise levels of the scheduler."
    return f"{count}: {', '.join(map(str, computed_steps(skip, steps)))}, from 0."


def _merging(config: Config) -> list[str]:
    where = {"module": "around every layer", "block": "around every block", "stage": "around every run of blocks"}
    lines = [f"{config.ratio:.0%} of the tokens are removed by merging ({config.label}), {where[config.scope]}"]
    start, end = config.window
    if (start, end) != (0.0, 1.0):
        lines.append(f"they are merged from {start:.0%} to {end:.0%} of the steps, and in no others")
    if config.skip_blocks:
        lines.append(f"these blocks are left whole: {', '.join(map(str, config.skip_blocks))}")
    return lines + method_of(config).describe(config)
