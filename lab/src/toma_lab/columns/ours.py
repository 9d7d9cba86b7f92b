"""The library in a column: a preset, ToMA or another method, with settings. The only file here that knows its API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from toma_diffusion import Handle, speed_up
from toma_diffusion.checks import check_known, check_one_of, hint, listed
from toma_diffusion.errors import UsageError
from toma_diffusion.families import find_family
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.schedule import Schedule
from toma_diffusion.merge.variants import VARIANTS, variant
from toma_diffusion.others import METHODS, method_of, settings_class
from toma_diffusion.presets import PRESETS, Chosen, Settings, named
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.learned import Learned
from toma_diffusion.skip.schedule import computed_steps
from toma_diffusion.tuned import Tuned
from toma_lab.bounds import Replaced
from toma_lab.parsing import parse_settings

CELLS_OF_THEIR_OWN = ("ratio", "scope", "assign")
"""Settings with a cell of their own in a row. The others are in the cell `settings`."""
LEARNED = "learned"
"""What was learned on the model: a file in what a user writes, which is in no title and no row; in settings the weights
themselves."""
SKIP_FIELDS = tuple(field.name for field in fields(Skip))
REPLACED: Mapping[str, str] = {"selection": "facility-location", "unmerge": "transpose"}
"""Choices of the paper's tables, and those of ToMA, which are not settings of the library: bounds.py has the others as
methods."""
LEFT_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "region": ("num_regions", "region_frames"),
    "region_tokens": ("num_regions",),
    "selection_tokens": ("num_regions",),
    "num_regions": ("region_tokens", "selection_tokens"),
    "scope": ("sites",),
}
"""A setting that the user changes, and those of the variant that it takes the place of."""


@dataclass(frozen=True)
class Ours:
    """What `speed_up` is called with."""

    preset: str | None = None
    merge: Merging | None = None
    """As it is on the run's model, with the blocks that are left whole."""
    skip: Skip | None = None
    learned: Learned | None = None

    def apply(self, pipe: Any) -> Handle:
        """Make a pipeline faster."""
        return speed_up(pipe, self.preset, merge=self.merge, skip=self.skip, learned=self.learned)

    def at(self, steps: int) -> Settings:
        """What is done in generations of so many steps."""
        chosen = self._chosen
        return Settings(chosen.merging if chosen.merges_in(steps) else None, chosen.skips_in(steps))

    @property
    def may_merge(self) -> bool:
        """Whether tokens are merged in generations of any number of steps."""
        return self._chosen.merging is not None

    @property
    def _chosen(self) -> Chosen:
        return Chosen(None if self.preset is None else named(self.preset), self.merge, self.skip, self.learned)

    def merges(self, steps: int) -> bool:
        """Whether tokens are merged in generations of so many steps."""
        return self.at(steps).merge is not None

    def skips(self, steps: int) -> bool:
        """Whether any of so many steps is skipped."""
        return len(self.computed(steps)) < steps

    def computed(self, steps: int) -> tuple[int, ...]:
        """Which of so many steps are computed, as far as it can be told without the scheduler."""
        skip = self.at(steps).skip
        return tuple(range(steps)) if skip is None else computed_steps(skip, steps)

    def count_merged(self, steps: int) -> int:
        """In how many of the computed steps tokens are merged."""
        merge = self.at(steps).merge
        if merge is None:
            return 0
        schedule = Schedule.from_config(merge)
        return sum(schedule.action(step, steps) is not None for step in self.computed(steps))

    def does(self, steps: int, computed: tuple[int, ...] | None = None) -> str:
        """What it does in so many steps: of two that do the same one is enough. Raises `UsageError` if it is nothing.

        Args:
            computed: the steps that were computed, if they are known: noise levels decide it, unless they are listed.
        """
        if not self.merges(steps) and not self.skips(steps):
            raise UsageError(f"nothing is merged or skipped in a generation of {steps} steps.")
        merge, skip = self.at(steps)
        which: Any = None
        if skip is not None and len(computed or self.computed(steps)) < steps:
            which = computed or (skip.computed if isinstance(skip.computed, tuple) else skip.count(steps))
        learned = None if skip is None or skip.learned is None else skip.learned.to_dict()
        return f"{type(merge).__name__} {merge and merge.to_dict()} {which} {learned}"

    def with_computed(self, computed: tuple[int, ...]) -> Ours:
        """The same with these computed steps, for which nothing was learned."""
        return replace(self, preset=None, skip=Skip(computed=computed), learned=None)

    def as_used(self) -> Ours:
        """With what was learned for its own number of computed steps, without that for others."""
        if self.learned is None:
            return self
        skip = self.at(self.learned.num_steps).skip
        assert skip is not None
        used = self.learned.of(skip.count(self.learned.num_steps))
        return replace(self, learned=replace(self.learned, steps=(used,)))

    def check_learned(self, steps: int) -> None:
        """Raise `UsageError` if what was learned is not for so many steps."""
        if self.learned is not None and self.learned.num_steps != steps:
            raise UsageError(f"it was learned with {self.learned.num_steps} steps, and this run has {steps}.")

    def value(self, name: str) -> Any:
        """A setting by its name, in types that JSON has."""
        values = {**REPLACED, **self._skip_values(), **({} if self.merge is None else self.merge.to_dict())}
        return True if name == LEARNED else values.get(name)

    def _skip_values(self) -> dict[str, Any]:
        values = {} if self.skip is None else {"computed": self.skip.to_dict()["computed"]}
        return values | ({} if self.learned is None else {LEARNED: True})

    def cells(self, overrides: Iterable[str]) -> dict[str, str]:
        """The cells of a row that it decides."""
        merge, noted = self.merge, dict[str, Any]()
        if merge is not None:
            values = merge.to_dict()
            usual = Merge().to_dict() | dict(REPLACED) if isinstance(merge, Merge) else type(merge)().to_dict()
            defaults = usual | {"skip_blocks": []}  # as it is on the model, not by the family's default
            noted = {
                name: value
                for name, value in sorted(values.items())
                if name not in CELLS_OF_THEIR_OWN and (value not in (defaults[name], None) or name in overrides)
            }
            noted |= {name: self.value(name) for name in REPLACED if name in overrides}
        if skip := self._skip_values():
            noted |= {"skip": skip}
        ratio, scope, assign = ("", "", "") if merge is None else (f"{merge.ratio:g}", merge.scope, merge.assign)
        settings = json.dumps(noted, separators=(",", ":"))
        ratio = ratio or ("" if self.preset is None and self.skip is None else "0")
        return {"settings": settings, "scope": scope, "assign": assign, "ratio": ratio}

    def in_sentences(self, steps: int) -> list[str]:
        """What it does in so many steps, in words."""
        merge, skip = self.at(steps)
        sentences = [] if merge is None else [f"{line[:1].upper()}{line[1:].rstrip('.')}." for line in _merging(merge)]
        if skip is not None and self.skips(steps):
            sentences.append(_computed(skip, steps))
            weights = "" if skip.learned is None else ", with weights that were learned on the model"
            sentences.append(f"In the others the model does not run: its output is predicted{weights}.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with every setting."""
        return {
            "preset": self.preset,
            "merge": None
            if self.merge is None
            else {"method": method_of(self.merge).name, "settings": self.merge.to_dict()},
            "skip": None if self.skip is None else self.skip.to_dict(),
            LEARNED: None if self.learned is None else self.learned.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ours:
        """The inverse of `to_dict`."""
        preset, merge, skip, learned = (values[name] for name in ("preset", "merge", "skip", LEARNED))
        return cls(
            preset,
            None if merge is None else settings_class(merge["method"]).from_dict(merge["settings"]),
            None if skip is None else Skip.from_dict(skip),
            None if learned is None else Learned.from_any(learned),
        )

    @classmethod
    def from_tuned(cls, tuned: Tuned) -> Ours | None:
        """What a file `tuned.json` says."""
        if tuned.does_nothing:
            return None
        skip, learned = tuned.skip, None if tuned.skip is None else tuned.skip.learned
        return cls(tuned.preset, tuned.merge, None if skip is None else replace(skip, learned=None), learned)

    def for_tuned(self) -> dict[str, Any]:
        """The same as fields of `Tuned`."""
        skip = self.skip
        if self.learned is not None:
            skip = replace(self.at(self.learned.num_steps).skip or Skip(), learned=self.learned)
        return {"preset": self.preset, "merge": self.merge, "skip": skip}


@dataclass(frozen=True)
class OurSpec:
    """A preset, a variant of ToMA or another method, and the fields to change in it, as a user writes them."""

    name: str
    overrides: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> OurSpec:
        """`toma`, `fast:computed=10`, `fast:learned=learned.json`, or `tomesd:max_downsample=2`."""
        name, _, changes = text.strip().partition(":")
        overrides = parse_settings(text, changes)
        known = (*PRESETS, *VARIANTS, *(each for each in METHODS if not issubclass(METHODS[each], Replaced)))
        if name not in known:
            raise UsageError(f"method {name!r} is not known: {listed(known)}.{hint(name, known)}")
        spec = cls(name, tuple(overrides.items()))
        spec.ours()  # raises, with the field and what is allowed, if anything is wrong
        if "ratio" in overrides and not spec.skips:
            raise UsageError(
                f"method {text!r} sets the ratio, which has an option of its own: leave it out of the settings."
            )
        return spec

    @property
    def merges(self) -> bool:
        """Whether it merges tokens at any number of steps."""
        return self.name not in PRESETS

    @property
    def skips(self) -> bool:
        """Whether it skips steps."""
        return not self.merges or any(name in SKIP_FIELDS for name, _ in self.overrides)

    def knows(self, field: str) -> bool:
        """Whether its merging has a field of that name."""
        return self.merges and field in METHODS.get(self.name, Merge).names()

    def ours(self, ratio: float | None = None, **model: bool) -> Ours:
        """Its settings, without the blocks that a model leaves whole.

        Args:
            ratio: of merging; None: its own.
            model: `selects_every_step`, see `toma_diffusion.merge.variants.variant`.
        """
        overrides = dict(self.overrides)
        skipping = {name: overrides.pop(name) for name in SKIP_FIELDS if name in overrides}
        learned = Learned.from_any(skipping.pop(LEARNED)) if LEARNED in skipping else None
        skip = Skip.from_dict(skipping) if skipping else None
        if not self.merges:
            check_known(f"preset {self.name}", overrides, SKIP_FIELDS)
            return Ours(self.name, None, skip, learned)
        ratio = overrides.pop("ratio", ratio)
        return Ours(None, self._merge(overrides, ratio, **model), skip, learned)

    def _merge(self, overrides: dict[str, Any], ratio: float | None, **model: bool) -> Merging:
        given = overrides | ({} if ratio is None else {"ratio": ratio})
        if self.name in METHODS:
            return METHODS[self.name].from_dict(given)
        own, gone = variant(self.name, **model).to_dict(), {name: LEFT_WITHOUT_EFFECT.get(name, ()) for name in given}
        values = own | {each: None for names in gone.values() for each in names} | given
        weighs, selects = values.get("reweigh_every"), values.get("select_every")
        if "reweigh_every" not in given and isinstance(weighs, int) and isinstance(selects, int) and weighs > selects:
            values["reweigh_every"] = None  # a selection always weighs
        selection, unmerge = (values.pop(name, usual) for name, usual in REPLACED.items())
        if (selection, unmerge) == tuple(REPLACED.values()):
            return Merge.from_dict(values)
        name = selection if unmerge == REPLACED["unmerge"] else unmerge
        check_one_of("selection or unmerge", name, (*REPLACED.values(), "random", "strided", "pseudo-inverse"))
        return settings_class(name).from_dict(values)

    def possible(self, ratios: Iterable[float]) -> list[float | None]:
        """Those of the ratios that it can have. ToMA can have any, other methods cannot. What skips steps has the ratio
        of its settings: None."""
        return [None] if self.skips else [ratio for ratio in ratios if self._allows(ratio)]

    def impossible(self, ratios: Iterable[float]) -> list[str]:
        """A sentence for each of the ratios that it cannot have."""
        beyond = [] if self.skips else sorted(ratio for ratio in {*ratios} if not self._allows(ratio))
        return [f"{self.name} cannot have ratio {ratio:g}." for ratio in beyond]

    def on(self, model: Any, ratios: Iterable[float]) -> list[tuple[Ours, tuple[str, ...]]]:
        """Its settings on this model at every ratio that it can have, and which of them the user set."""
        ratios, family, found = list(ratios), find_family(model), []
        selects = family is not None and family.selects_every_step(model)
        for ratio in self.possible(ratios) or ratios:  # if none is, the error says why
            ours = self.ours(ratio, selects_every_step=selects)
            with ours.apply(model) as handle:
                merging = handle.summary().merge
            if ours.merge is not None and merging is not None:
                ours = replace(ours, merge=merging.config)
            found.append((ours, tuple(dict(self.overrides))))
        return found

    def _allows(self, ratio: float) -> bool:
        try:
            self.ours(ratio)
        except UsageError:
            return False
        return True


def named_after(merge: Merging) -> str:
    """The variant of ToMA, or the method, that settings are nearest to."""
    if not isinstance(merge, Merge):
        return method_of(merge).name
    values = merge.to_dict()

    def differences(name: str) -> int:
        own = VARIANTS[name].to_dict()
        return sum(values[each] != own[each] for each in own if each not in ("ratio", "skip_blocks"))

    return min(VARIANTS, key=differences)


def shares_positions(model: Any) -> bool:
    """Whether all samples have one table of positions, as in Flux: they then share their destinations."""
    family = find_family(model)
    return family is not None and family.is_joint(model)


def count_blocks(model: Any) -> int:
    """Transformer blocks of a model."""
    family = find_family(model)
    return len(family.blocks(model)) if family else 0


def _computed(skip: Skip, steps: int) -> str:
    count = f"{skip.count(steps)} of {steps} steps are computed"
    if skip.learned is None and not isinstance(skip.computed, tuple):
        return f"{count}, spread by the noise levels of the scheduler."
    return f"{count}: {', '.join(map(str, computed_steps(skip, steps)))}, from 0."


def _merging(merge: Merging) -> list[str]:
    where = {"module": "around every layer", "block": "around every block", "stage": "around every run of blocks"}
    lines = [f"{merge.ratio:.0%} of the tokens are removed by merging ({merge.label}), {where[merge.scope]}"]
    start, end = merge.window
    if (start, end) != (0.0, 1.0):
        lines.append(f"they are merged from {start:.0%} to {end:.0%} of the steps, and in no others")
    if merge.skip_blocks:
        lines.append(f"these blocks are left whole: {', '.join(map(str, merge.skip_blocks))}")
    return lines + method_of(merge).describe(merge)
