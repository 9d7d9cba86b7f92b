"""The settings of a run: which images, with which methods, scored by which metrics. They are saved in its folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toma_diffusion.checks import check_integer
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Config
from toma_diffusion.others import config_class
from toma_lab.experiments.cells import LEARNED, Cell
from toma_lab.experiments.shortcuts import Shortcut, shortcut_from_dict
from toma_lab.pipelines.clips import ClipRequest
from toma_lab.pipelines.generation import ImageRequest

BASELINE, NOISE_FLOOR = "baseline", "noise floor"


@dataclass(frozen=True)
class Item:
    """One image to generate: a prompt and a seed."""

    index: int
    """Position of the prompt in the run's list."""
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """A short name for files: `p0003-s1`."""
        return f"p{self.index:04d}-s{self.seed}"


@dataclass(frozen=True)
class Variant:
    """A way to generate every item: merging, a shortcut such as fewer steps, or both. One row of the table."""

    name: str
    """Name of the preset or method, or of the first shortcut. `BASELINE` and `NOISE_FLOOR` do neither."""
    config: Config | None = None
    """As it is applied to the run's model. None if nothing is merged."""
    overrides: tuple[str, ...] = ()
    """Fields that the user set. They distinguish variants of the same name and ratio."""
    shortcuts: tuple[Shortcut, ...] = ()
    """What else saves time, in the order in which it is applied, before merging."""

    @property
    def saves_time(self) -> bool:
        """Whether it is anything but the model as it is."""
        return self.config is not None or bool(self.shortcuts)

    @property
    def slug(self) -> str:
        """The name of its folders. It does not depend on defaults, so that old folders stay readable."""
        if self.config is None and self.shortcuts:
            return "-".join(shortcut.slug for shortcut in self.shortcuts)
        parts = [re.sub(r"[^a-z0-9]+", "-", self.name.lower())]
        if self.config is not None:
            parts.append(f"{self.config.ratio:g}")
        if self.overrides:
            text = json.dumps(self.asked_for, sort_keys=True)
            parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
        return "-".join([*parts, *(shortcut.slug for shortcut in self.shortcuts)])

    @property
    def title(self) -> str:
        """The name in tables: `toma 0.5, num_regions=256`, `14 steps`, or `toma-stage 0.5 + 14 steps`."""
        own = [] if self.config is None and self.shortcuts else [self._own_title]
        return " + ".join([*own, *(shortcut.title for shortcut in self.shortcuts)])

    @property
    def _own_title(self) -> str:
        name = self.name if self.config is None or not self.config.shows_ratio else f"{self.name} {self.config.ratio:g}"
        others = self.changes
        if name != self.name:
            others.pop("ratio", None)
        return ", ".join([name, *others.values()])

    @property
    def family(self) -> tuple[str, str]:
        """Name and settings of what differs from it in one number alone: one line of a plot."""
        if self.config is None and len(self.shortcuts) == 1:
            return self.shortcuts[0].family
        settings = self.changes.values()
        if self.config is None and self.shortcuts:
            return self.title, ""
        return self.name, ", ".join([*settings, *(f"+ {shortcut.title}" for shortcut in self.shortcuts)])

    @property
    def point(self) -> str:
        """That number: the ratio, or of a shortcut alone the steps, the threshold or the interval."""
        if self.config is not None:
            return f"{self.config.ratio:g}" if self.config.shows_ratio else ""
        if len(self.shortcuts) == 1:
            return self.shortcuts[0].point
        return ""

    @property
    def asked_for(self) -> dict[str, Any]:
        """The fields of merging that the user set, with their values."""
        return {} if self.config is None else {name: self.config.value_of(name) for name in self.overrides}

    @property
    def changes(self) -> dict[str, str]:
        """The same as a user writes them, by name. Of learned weights only that there are any."""
        return {name: name if name == LEARNED else f"{name}={value}" for name, value in self.asked_for.items()}

    @property
    def key(self) -> dict[str, str]:
        """The columns of the table that identify it, as in `toma bench`. `settings` has those of shortcuts too."""
        key = Cell(self.name, self.config, self.overrides).key
        names = [] if self.config is None and self.shortcuts else [self.name]
        settings = json.loads(key["settings"])
        for shortcut in self.shortcuts:
            names.append(shortcut.name)
            settings |= shortcut.settings
        return key | {"method": "+".join(names), "settings": json.dumps(settings, separators=(",", ":"))}

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

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with every setting."""
        config = None if self.config is None else self.config.to_dict()
        plain = {"name": self.name, "config": config, "overrides": list(self.overrides)}
        shortcuts = [shortcut.to_dict() for shortcut in self.shortcuts]
        return plain | ({"shortcuts": shortcuts} if shortcuts else {})  # older runs had none

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Variant:
        """The inverse of `to_dict`."""
        name, config = values["name"], values["config"]
        settings = None if config is None else config_class(name).from_dict(config)
        shortcuts = tuple(shortcut_from_dict(each) for each in values.get("shortcuts", ()))
        return cls(name, settings, tuple(values["overrides"]), shortcuts)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of a run."""

    model: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    """The first is the baseline, with which the others are compared."""
    metrics: tuple[str, ...]
    steps: int
    guidance: float | None = None
    """None, here and below: the default of the pipeline."""
    width: int | None = None
    height: int | None = None
    batch: int = 1
    """How many images are generated in one call of the pipeline."""
    clips: bool = False
    """Whether its images are clips, which have the three fields below."""
    frames: int | None = None
    fps: float | None = None
    image: str = ""
    """Name and hash of the image that all clips begin with, if they do."""
    dtype: str = ""
    weights: str = ""
    """Fingerprint of the model's weights: a model may be trained again in the same folder."""
    blocks: int = 0
    """Transformer blocks of the model; 0 in older runs."""
    time_of: str = ""
    """The large model for whose time the gain is computed. Empty: it is measured."""
    paper: str = ""
    """The table of the paper that the variants belong to, if any."""

    def __post_init__(self) -> None:
        if not self.prompts or not self.seeds:
            raise UsageError("a run needs at least one prompt and one seed.")
        for seed in self.seeds:
            self.request(Item(0, "", seed), self.steps)  # checks the values
        check_integer("batch", self.batch, minimum=1)
        repeated = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if repeated:
            raise UsageError(f"seed {repeated[0]} is given twice: the same image would be generated twice.")
        if not self.variants or self.variants[0].name != BASELINE:
            raise UsageError(f"the first variant must be the {BASELINE}: the others are compared with it.")
        slugs = [variant.slug for variant in self.variants]
        for variant in self.variants:
            variant.steps_of(self.steps)  # raises if they are not fewer
            if slugs.count(variant.slug) > 1:
                raise UsageError(f"the variant {variant.title!r} is asked for twice.")

    @property
    def items(self) -> list[Item]:
        """All images of a variant, prompt by prompt."""
        return [Item(index, prompt, seed) for index, prompt in enumerate(self.prompts) for seed in self.seeds]

    @property
    def batches(self) -> list[tuple[Item, ...]]:
        """The same in groups that are generated together."""
        items = self.items
        return [tuple(items[start : start + self.batch]) for start in range(0, len(items), self.batch)]

    @property
    def baseline(self) -> Variant:
        """The variant that the others are compared with."""
        return self.variants[0]

    def request(self, item: Item, steps: int, image: Path | None = None) -> ImageRequest:
        """What an item asks of the pipeline. Where the image is, the plan does not say: a path is private."""
        common = (item.prompt, item.seed, steps, self.guidance, self.width, self.height)
        if not self.clips:
            return ImageRequest(*common)
        return ClipRequest(*common, frames=self.frames, fps=self.fps, image=image)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return plain | {"variants": [variant.to_dict() for variant in self.variants]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        read["variants"] = tuple(Variant.from_dict(each) for each in values["variants"])
        return cls(**read)
