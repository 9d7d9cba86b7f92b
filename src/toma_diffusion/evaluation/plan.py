"""What a run is asked for: which images, drawn in which ways, scored how. All of it stands in the run's folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toma_diffusion.config import Config
from toma_diffusion.errors import UsageError
from toma_diffusion.experiments.cells import Cell
from toma_diffusion.methods import config_class
from toma_diffusion.pipelines.generation import Drawing

BASELINE, NOISE_FLOOR = "baseline", "noise floor"


@dataclass(frozen=True)
class Item:
    """One image to draw: a prompt and a seed."""

    index: int
    """Of the prompt in the run's list."""
    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """Short, and fit for a file: `p0003-s1`."""
        return f"p{self.index:04d}-s{self.seed}"


@dataclass(frozen=True)
class Variant:
    """One way to draw every item, and one row of the table."""

    name: str
    """Of the preset or method; `BASELINE` and `NOISE_FLOOR` merge nothing."""
    config: Config | None = None
    """As it is applied to the run's model; None where nothing is merged."""
    overrides: tuple[str, ...] = ()
    """Fields that were asked for: they tell it from other variants of the same name and ratio."""

    @property
    def slug(self) -> str:
        """Its name as a folder's. It does not change when defaults do, so that old folders stay readable."""
        parts = [re.sub(r"[^a-z0-9]+", "-", self.name.lower())]
        if self.config is not None:
            parts.append(f"{self.config.ratio:g}")
        if self.overrides:
            text = json.dumps(self.asked_for, sort_keys=True)
            parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
        return "-".join(parts)

    @property
    def title(self) -> str:
        """Its name for people: `toma 0.5, num_regions=256`."""
        name = self.name if self.config is None else f"{self.name} {self.config.ratio:g}"
        return ", ".join([name, *(f"{field}={value}" for field, value in self.asked_for.items())])

    @property
    def asked_for(self) -> dict[str, Any]:
        """The fields that were asked for, with their values."""
        values = {} if self.config is None else self.config.to_dict()
        return {name: values[name] for name in self.overrides}

    @property
    def key(self) -> dict[str, str]:
        """The columns of the table that say what it is, as in `toma bench`."""
        return Cell(self.name, self.config, self.overrides).key

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with every setting."""
        config = None if self.config is None else self.config.to_dict()
        return {"name": self.name, "config": config, "overrides": list(self.overrides)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Variant:
        """The inverse of `to_dict`."""
        name, config = values["name"], values["config"]
        settings = None if config is None else config_class(name).from_dict(config)
        return cls(name, settings, tuple(values["overrides"]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that one run is asked for."""

    model: str
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    """The baseline, against which the others are compared, is the first."""
    metrics: tuple[str, ...]
    steps: int
    guidance: float | None = None
    """None, here and below: the pipeline's own."""
    width: int | None = None
    height: int | None = None
    dtype: str = ""
    weights: str = ""
    """Their fingerprint: a model may be trained anew in the same folder."""
    paper: str = ""
    """The paper's table whose rows these are, if they are."""

    def __post_init__(self) -> None:
        if not self.prompts or not self.seeds:
            raise UsageError("a run needs at least one prompt and one seed.")
        for seed in self.seeds:
            Drawing("", seed, self.steps, self.guidance, self.width, self.height)  # raises what is wrong with it
        repeated = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if repeated:
            raise UsageError(f"seed {repeated[0]} is given twice: the same image would be drawn twice.")
        if not self.variants or self.variants[0].name != BASELINE:
            raise UsageError(f"the first variant must be the {BASELINE}: the others are compared with it.")
        slugs = [variant.slug for variant in self.variants]
        for variant in self.variants:
            if slugs.count(variant.slug) > 1:
                raise UsageError(f"the variant {variant.title!r} is asked for twice.")

    @property
    def items(self) -> list[Item]:
        """All images of a variant, prompt by prompt."""
        return [Item(index, prompt, seed) for index, prompt in enumerate(self.prompts) for seed in self.seeds]

    @property
    def baseline(self) -> Variant:
        """What the others are compared with."""
        return self.variants[0]

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
