"""A column: one way to make every picture of a run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut
from toma_lab.columns.ours import LEARNED, Ours, OurSpec, shares_positions
from toma_lab.columns.shortcuts import parse_shortcut, shortcut_class, shortcut_from_dict

BASELINE, NOISE_FLOOR = "baseline", "noise floor"
EMPTY = {"settings": "{}", "scope": "", "assign": "", "ratio": ""}


@dataclass(frozen=True)
class Column:
    """The library with its settings, shortcuts such as fewer steps, or both."""

    name: str
    """Of the preset or method, or of the first shortcut. `BASELINE` and `NOISE_FLOOR` do neither."""
    own: Ours | None = None
    """What the library does, as it is applied to the run's model. None: without the library."""
    overrides: tuple[str, ...] = ()
    """Fields that the user set. They distinguish columns of the same name and ratio."""
    shortcuts: tuple[Shortcut, ...] = ()
    """What else saves time, in the order in which it is applied, before the library."""

    @property
    def saves_time(self) -> bool:
        """Whether it is anything but the model as it is."""
        return self.own is not None or bool(self.shortcuts)

    @property
    def is_cached(self) -> bool:
        """Whether a cache decides while the model runs what is computed."""
        return any(shortcut.is_cache for shortcut in self.shortcuts)

    @property
    def column_id(self) -> str:
        """Its name in paths and rows."""
        if self.own is None and self.shortcuts:
            return "-".join(shortcut.slug for shortcut in self.shortcuts)
        parts = [re.sub(r"[^a-z0-9]+", "-", self.name.lower())]
        if self.own is not None and self.own.merge is not None:
            parts.append(f"{self.own.merge.ratio:g}")
        if self.overrides:
            learned = None if self.own is None or self.own.learned is None else self.own.learned.to_dict()
            text = json.dumps([self._asked_for, learned] if learned else self._asked_for, sort_keys=True)
            parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
        return "-".join([*parts, *(shortcut.slug for shortcut in self.shortcuts)])

    @property
    def title(self) -> str:
        """The name in tables: `toma 0.5, num_regions=256`, `14 steps`, or `toma-stage 0.5 + 14 steps`."""
        own = [] if self.own is None and self.shortcuts else [self._own_title]
        return " + ".join([*own, *(shortcut.title for shortcut in self.shortcuts)])

    @property
    def _own_title(self) -> str:
        merge = None if self.own is None else self.own.merge
        name = self.name if merge is None else f"{self.name} {merge.ratio:g}"
        others = self.changes
        if name != self.name:
            others.pop("ratio", None)
        return ", ".join([name, *others.values()])

    @property
    def line(self) -> tuple[str, str]:
        """Name and settings of what differs from it in one number alone: one line of a plot."""
        if self.own is None and len(self.shortcuts) == 1:
            return self.shortcuts[0].line
        if self.own is None and self.shortcuts:
            return self.title, ""
        return self.name, ", ".join([*self.changes.values(), *(f"+ {each.title}" for each in self.shortcuts)])

    @property
    def point(self) -> str:
        """That number: the ratio, or of a shortcut alone the steps, the threshold or the interval."""
        if self.own is not None:
            return "" if self.own.merge is None else f"{self.own.merge.ratio:g}"
        return self.shortcuts[0].point if len(self.shortcuts) == 1 else ""

    @property
    def _asked_for(self) -> dict[str, Any]:
        return {} if self.own is None else {name: self.own.value(name) for name in self.overrides}

    @property
    def changes(self) -> dict[str, str]:
        """The fields that the user set, as they are written. Of learned weights only that there are any."""
        return {n: n if n == LEARNED else f"{n}={value}" for n, value in self._asked_for.items()}

    @property
    def key(self) -> dict[str, str]:
        """The cells of a row that identify it. `settings` has those of shortcuts too."""
        cells = EMPTY if self.own is None else self.own.cells(self.overrides)
        names = [] if self.own is None and self.shortcuts else [self.name]
        settings = json.loads(cells["settings"])
        for shortcut in self.shortcuts:
            names.append(shortcut.name)
            settings |= shortcut.settings
        return {"method": "+".join(names)} | cells | {"settings": json.dumps(settings, separators=(",", ":"))}

    @property
    def cells(self) -> dict[str, str]:
        """All cells of a row that say what it is."""
        return self.key | {
            "title": self.title,
            "changed": "; ".join(self.changes.values()),
            "shortcuts": "+".join(shortcut.text for shortcut in self.shortcuts),
            "column": json.dumps(self.to_dict(), separators=(",", ":")),
        }

    def alone(self) -> Column:
        """The same whichever of its settings were asked for: two that are equal make the same pictures."""
        return replace(self, overrides=())

    def steps_of(self, steps: int) -> int:
        """How many it takes, of the run's steps."""
        for shortcut in self.shortcuts:
            steps = shortcut.steps_of(steps)
        return steps

    def requested_steps(self, steps: int) -> int:
        """How many the pipeline is asked for."""
        for shortcut in self.shortcuts:
            steps = shortcut.requested_steps(steps)
        return steps

    def merges(self, steps: int) -> bool:
        """Whether it merges tokens in a run of so many steps."""
        return self.own is not None and self.own.merges(self.steps_of(steps))

    def skips(self, steps: int) -> bool:
        """Whether the library skips steps in a run of so many."""
        return self.own is not None and self.own.skips(self.steps_of(steps))

    def mixes_images(self, model: Any) -> bool:
        """Whether an image would be another one in a batch of several, and not by rounding alone."""
        merges_jointly = self.own is not None and self.own.may_merge and shares_positions(model)
        return merges_jointly or any(shortcut.mixes_images for shortcut in self.shortcuts)

    def in_sentences(self, steps: int) -> list[str]:
        """What it does in a run of so many steps, for users."""
        sentences = [] if self.own is None else self.own.in_sentences(self.steps_of(steps))
        sentences += [shortcut.sentence(steps) for shortcut in self.shortcuts]
        return sentences or ["Nothing is changed: the model as it is."]

    @contextmanager
    def applied(self, pipe: Any, steps: int) -> Iterator[Any]:
        """Apply it for the duration of a `with` block, for one generation of a run of `steps` steps.

        Yields the library's handle, if it is used. A cache is empty at the beginning, and gone at the end.
        """
        with ExitStack() as stack:
            for shortcut in self.shortcuts:  # before merging, which leaves alone what a cache compares
                stack.enter_context(shortcut.applied(pipe, self.steps_of(steps)))
            if self.name == NOISE_FLOOR:
                # The same computation with other rounding: differences below this one are rounding noise.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            yield None if self.own is None else stack.enter_context(self.own.apply(pipe))

    def fitted(self, pipe: Any, generate: Callable[[], object], steps: int) -> Column:
        """The column with what its shortcuts have to measure on the model first. `generate` generates an image of as
        many steps as it requests; `steps` are those of the run."""
        left = self.steps_of(steps)
        with ExitStack() as stack:
            for shortcut in self.shortcuts:
                if not shortcut.is_cache:  # a cache is fitted to the steps that are taken
                    stack.enter_context(shortcut.applied(pipe, left))
            return replace(self, shortcuts=tuple(each.fitted(pipe, generate, left) for each in self.shortcuts))

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with every setting."""
        return {
            "name": self.name,
            "title": self.title,
            "own": None if self.own is None else self.own.to_dict(),
            "overrides": list(self.overrides),
            "shortcuts": [shortcut.to_dict() for shortcut in self.shortcuts],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Column:
        """The inverse of `to_dict`."""
        own = None if values["own"] is None else Ours.from_dict(values["own"])
        shortcuts = tuple(map(shortcut_from_dict, values["shortcuts"]))
        return cls(values["name"], own, tuple(values["overrides"]), shortcuts)


UNCHANGED = (Column(BASELINE), Column(NOISE_FLOOR))
"""The first two columns of an evaluation."""


@dataclass(frozen=True)
class ColumnSpec:
    """What a user asks for: the library with settings, shortcuts, or both."""

    own: OurSpec | None
    shortcuts: tuple[Shortcut, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ColumnSpec:
        """`fast:computed=10`, `steps:14`, or `fast+steps:14`."""
        parts = re.split(r"\+(?=[A-Za-z])", text.strip())  # not that of scale=1e+3
        own = [OurSpec.parse(part) for part in parts if shortcut_class(part) is None]
        shortcuts = [parse_shortcut(part) for part in parts if shortcut_class(part) is not None]
        for several, what in (
            ([each.name for each in own], "methods of merging"),
            ([each.name for each in shortcuts if each.is_cache], "caches"),
            ([each.text for each in shortcuts if not each.is_cache], "numbers of steps"),
        ):
            if len(several) > 1:
                raise UsageError(f"method {text!r} has several {what}, {' and '.join(several)}: leave one.")
        return cls(own[0] if own else None, tuple(shortcuts))

    def impossible(self, ratios: Iterable[float]) -> list[str]:
        """A sentence for each of the ratios that it cannot have."""
        return [] if self.own is None else self.own.impossible(ratios)


def columns_of(pipe_or_model: Any, specs: Iterable[ColumnSpec], ratios: Iterable[float]) -> list[Column]:
    """One per method and ratio, with the settings that the library uses for this model; one for shortcuts alone.

    Args:
        pipe_or_model: a model alone does not tell whether shortcuts that need a pipeline are possible.
        ratios: those that a method cannot have are left out.
    """
    ratios, model = list(ratios), find_denoisers(pipe_or_model)[0]
    found: dict[Column, None] = {}
    for spec in specs:
        for shortcut in spec.shortcuts:
            shortcut.check_on(pipe_or_model)
        if spec.own is None:
            found[Column(spec.shortcuts[0].name, shortcuts=spec.shortcuts)] = None
        else:
            for own, overrides in spec.own.on(model, ratios):
                found[Column(spec.own.name, own, overrides, spec.shortcuts)] = None
    return list(found)
