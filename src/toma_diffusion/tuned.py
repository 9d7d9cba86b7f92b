"""The file `tuned.json`: a setting that `toma tune` found for one class of model and one number of steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from toma_diffusion.errors import UsageError
from toma_diffusion.files import read_json, replacing
from toma_diffusion.merge.base import Merging
from toma_diffusion.others import method_of, settings_class
from toma_diffusion.presets import Chosen, named
from toma_diffusion.skip.config import Skip

FORMAT = 3
SUFFIX = ".json"
FEWER_STEPS = "steps"
"""The shortcut that takes fewer steps. The others are caches, other solvers, or lists of timesteps."""


@dataclass(frozen=True)
class ClipSize:
    """The clips that a setting was measured on. None: the default of the pipeline."""

    frames: int | None
    width: int | None
    """In pixels, like `height`."""
    height: int | None

    def __str__(self) -> str:
        return f"{self.frames} frames of {self.width}×{self.height}"


@dataclass(frozen=True)
class Tuned:
    """A setting, what it is for, and what was measured of it."""

    model_class: str
    """Of the denoiser."""
    num_steps: int
    """Of the generations for which it was found, with nothing saved."""
    preset: str | None = None
    """What `speed_up` gets, like `merge` and `skip`."""
    merge: Merging | None = None
    skip: Skip | None = None
    shortcuts: tuple[Mapping[str, Any], ...] = ()
    """Fewer steps, caches and the like, by name and settings."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    clip: ClipSize | None = None
    """None: it was found for images."""

    @property
    def steps_left(self) -> int:
        """The steps that are computed: `num_steps`, or fewer if that is part of the setting."""
        return next(
            (each["settings"]["steps"] for each in self.shortcuts if each["name"] == FEWER_STEPS), self.num_steps
        )

    @classmethod
    def read(cls, path: str | Path) -> Tuned:
        """From a file. Raises `UsageError` if it is none of ours."""
        values = read_json(path, repr(str(path)), "`toma tune`")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            held = values.get("format") if isinstance(values, dict) else None
            raise UsageError(
                f"{str(path)!r} has format {held!r}, this version reads format {FORMAT}: run `toma tune` again, or "
                "install the version that wrote it."
            )
        try:
            merge, skip = values["merge"], values["skip"]
            return cls(
                values["model_class"],
                values["num_steps"],
                values["preset"],
                None if merge is None else settings_class(merge["method"]).from_dict(merge["settings"]),
                None if skip is None else Skip.from_dict(skip),
                tuple(values["shortcuts"]),
                values["measured"],
                ClipSize(**values["clip"]) if "clip" in values else None,
            )
        except (LookupError, TypeError) as error:
            raise UsageError(f"{str(path)!r} is not complete ({error!r}): run `toma tune` again.") from error

    def write(self, path: Path) -> None:
        values = {
            "format": FORMAT,
            "model_class": self.model_class,
            "num_steps": self.num_steps,
            "preset": self.preset,
            "merge": None
            if self.merge is None
            else {"method": method_of(self.merge).name, "settings": self.merge.to_dict()},
            "skip": None if self.skip is None else self.skip.to_dict(),
            "shortcuts": [dict(each) for each in self.shortcuts],
            "measured": dict(self.measured),
        } | ({} if self.clip is None else {"clip": asdict(self.clip)})
        with replacing(path) as file:
            file.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def check_model(self, model: nn.Module) -> None:
        """Raise if it was found for another class of model."""
        if type(model).__name__ != self.model_class:
            raise UsageError(
                f"the setting was found for a {self.model_class}, this model is a {type(model).__name__}: run "
                "`toma tune` on this one."
            )

    def check_thing(self, pipe: Any, *, makes_clips: bool) -> None:
        """Raise if it was found for images and the pipeline makes clips, or the other way round."""
        if makes_clips != (self.clip is not None):
            made, found = ("clips", "images") if makes_clips else ("images", "clips")
            raise UsageError(
                f"the setting was found for {found}, and a {type(pipe).__name__} generates {made}: run `toma tune` on "
                "this pipeline."
            )

    def check_steps(self, steps: int) -> None:
        """Raise if a generation has another number of steps."""
        if steps != self.num_steps:
            raise UsageError(
                f"the setting was found for {self.num_steps} steps, not for {steps}: generate with {self.num_steps}, "
                f"or run `toma tune --steps {steps}`."
            )

    @property
    def does_nothing(self) -> bool:
        """Whether the model is left as it is, but for shortcuts."""
        return self.preset is None and self.merge is None and self.skip is None

    def chosen(self) -> Chosen:
        """What `speed_up` applies. Raises `UsageError`, which says what to do instead, if that is not all of it."""
        others = [each for each in self.shortcuts if each["name"] != FEWER_STEPS]
        if others:
            settings = ", ".join(f"{name}={value!r}" for name, value in others[0]["settings"].items())
            raise UsageError(
                f"the setting has {others[0]['name']} ({settings}), which speed_up cannot switch on: use "
                "`toma generate --config`, or diffusers' own call (docs/tune.md)."
            )
        if self.does_nothing and self.shortcuts:
            raise UsageError(
                f"the setting is fewer steps, which speed_up cannot set: call the pipeline with "
                f"num_inference_steps={self.steps_left}, or use `toma generate --config`."
            )
        if self.does_nothing:
            raise UsageError(
                "the file says that nothing was found within the limit: use the pipeline as it is, or run `toma tune` "
                "with a larger limit."
            )
        return Chosen(None if self.preset is None else named(self.preset), self.merge, self.skip)
