"""A shortcut: a way to generate faster other than with the library, to compare it with and to combine it with."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import nn

from toma_diffusion.checks import check_flag, check_integer, check_number, check_one_of, hint, listed
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError

Self = TypeVar("Self", bound="Shortcut")
Check = Callable[[str, Any], Any]
"""Of a setting: takes its name and value, returns the value or raises `UsageError`."""


@dataclass(frozen=True)
class Shortcut(ABC):
    """One way to save time, with its settings. Immutable, so that two with equal settings are equal."""

    name: ClassVar[str]
    """As a user writes it."""
    knob: ClassVar[str]
    """The setting that trades time for quality. Shortcuts that differ in it alone are one line of a plot."""
    checks: ClassVar[Mapping[str, Check]]
    """Its settings, and what is allowed."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Defaults that are needed here."""
    mixes_images: ClassVar[bool] = False
    """Whether what it does to an image depends on the other images of its batch."""
    counts_all_steps: ClassVar[bool] = False
    """Whether it must see every step, so that it cannot be used where several denoisers take turns."""
    is_cache: ClassVar[bool] = True
    """Whether it decides in each step what is computed. If not, it changes which steps are taken."""
    needs_pipeline: ClassVar[bool] = False
    """Whether it acts on more of a pipeline than the denoiser."""

    chosen: tuple[tuple[str, Any], ...] = ()
    """What the user set."""

    @classmethod
    def from_settings(cls: type[Self], settings: Mapping[str, Any]) -> Self:
        """With these settings; the others take their defaults. A wrong one raises `UsageError`."""
        for name in settings:
            if name not in cls.checks:
                raise UsageError(
                    f"{name!r} is not a setting of {cls.name}: {listed(cls.checks)}.{hint(name, cls.checks)}"
                )
        return cls(tuple((name, cls.checks[name](name, value)) for name, value in settings.items()))

    @property
    def settings(self) -> dict[str, Any]:
        """What the user set, in types that JSON has."""
        return dict(self.chosen)

    def value(self, name: str) -> Any:
        """A setting; its default, if the user did not set it."""
        return self.settings.get(name, self.usual.get(name))

    @property
    def text(self) -> str:
        """As a user writes it, with its settings: `deepcache:interval=3`."""
        return f"{self.name}:{';'.join(self._written())}" if self.chosen else self.name

    @property
    def title(self) -> str:
        """The name in tables."""
        return ", ".join([self.name, *self._written()])

    @property
    def line(self) -> tuple[str, str]:
        """Its name and its settings, without the knob: the title of its line in a plot."""
        return self.name, ", ".join(self._written(without=self.knob))

    def _written(self, without: str = "") -> list[str]:
        return [f"{name}={written(value)}" for name, value in self.chosen if name != without]

    @property
    def point(self) -> str:
        """The value of the knob: what a plot writes at the point."""
        return str(self.settings.get(self.knob, ""))

    @property
    def skipped_step(self) -> str:
        """The measured step of step_costs.csv that one skipped by it costs, or more than that."""
        return self.name

    @property
    def more_blocks(self) -> int:
        """How many blocks a skipped step computes beyond those of `skipped_step`."""
        return 0

    @property
    def slug(self) -> str:
        """The name in paths."""
        return re.sub(r"[^a-z0-9.]+", "-", self.text.lower()).strip("-")

    def steps_of(self, steps: int) -> int:
        """The steps that remain of the run's steps: in each of them the denoiser is called."""
        return steps

    def requested_steps(self, steps: int) -> int:
        """The number of steps that the pipeline is asked for."""
        return self.steps_of(steps)

    def check(self, model: nn.Module) -> None:  # noqa: B027 (some can be applied to any model)
        """Raise `UsageError` if it cannot be applied to this model, or if a package is missing."""

    def check_pipeline(self, pipe: Any) -> None:  # noqa: B027 (most need nothing of it)
        """Raise `UsageError` if it cannot be applied to this pipeline, for another reason than its denoiser."""

    def check_on(self, pipe_or_model: Any) -> None:
        """Raise `UsageError` if it cannot be applied to a pipeline; of a model alone only what that says is checked."""
        models = find_denoisers(pipe_or_model)
        if len(models) > 1 and self.counts_all_steps:
            raise UsageError(
                f"{self.text!r} cannot be used with {len(models)} denoisers that take turns, as this pipeline has: it "
                "counts the steps of one. Leave it out, or use first-block-cache or taylorseer."
            )
        for model in models:
            self.check(model)
        if not isinstance(pipe_or_model, nn.Module):
            self.check_pipeline(pipe_or_model)

    def sentence(self, steps: int) -> str:
        """What it does in a run of so many steps, for users."""
        return f"The cache {self.name} is on ({', '.join(self._written())}): it skips what changes little."

    def watched(self, pipe: Any) -> nn.Module | None:
        """The block that tells whether a step was skipped; None: that in the middle."""
        return None

    def fitted(self, pipe: Any, generate: Callable[[], object], steps: int) -> Shortcut:
        """The same, fitted to a model if it must be. `generate` generates one image with the pipeline as it is."""
        return self

    @abstractmethod
    def applied(self, pipe: Any, steps: int) -> AbstractContextManager[object]:
        """Apply it to a pipeline for the duration of a `with` block, for one generation of that many steps."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "settings": self.settings}


def written(value: Any) -> str:
    """A value as a user writes it: a tuple without spaces, in parentheses."""
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def at_least(minimum: int) -> Check:
    """A whole number."""
    return lambda name, value: check_integer(name, value, minimum=minimum)


def not_negative(name: str, value: Any) -> float:
    """A number of 0 or more."""
    return check_number(name, value, "0 or more", lambda number: number >= 0)


def one_of(*names: str) -> Check:
    """One of these names."""

    def check(name: str, value: Any) -> Any:
        check_one_of(name, value, names)
        return value

    return check


def yes_or_no(name: str, value: Any) -> bool:
    """True or False."""
    check_flag(name, value)
    return bool(value)


@contextmanager
def forwards_restored(model: nn.Module) -> Iterator[None]:
    """Remove what caches leave behind: a `forward` in the place of the class's own, which a copy would share."""
    untouched = [module for module in model.modules() if "forward" not in vars(module)]
    try:
        yield
    finally:
        for module in untouched:
            vars(module).pop("forward", None)
