"""What all shortcuts share: a name, settings, and a way to apply them to a pipeline."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar

from torch import nn

from toma_diffusion.api import find_denoisers
from toma_diffusion.checks import hint, listed
from toma_diffusion.errors import UsageError

Self = TypeVar("Self", bound="Shortcut")


class Shortcut(ABC):
    """A way to generate faster other than merging tokens. Immutable, so that two with equal settings are equal."""

    name: ClassVar[str]
    """As a user writes it."""
    knob: ClassVar[str]
    """The setting that trades time for quality. Shortcuts that differ in it alone are one line of a plot."""
    mixes_images: ClassVar[bool] = False
    """Whether what it does to an image depends on the other images of its batch."""
    counts_all_steps: ClassVar[bool] = False
    """Whether it must see every step, so that it cannot be used where several denoisers take turns."""
    is_cache: ClassVar[bool] = True
    """Whether it decides in each step what is computed. If not, it changes which steps are taken."""
    needs_pipeline: ClassVar[bool] = False
    """Whether it acts on more of a pipeline than the denoiser."""

    @classmethod
    @abstractmethod
    def from_settings(cls: type[Self], settings: Mapping[str, Any]) -> Self:
        """With these settings; the others take their defaults. A wrong one raises `UsageError`."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the user set, in types that JSON has."""

    @property
    def text(self) -> str:
        """As a user writes it, with its settings: `deepcache:interval=3`."""
        settings = ";".join(f"{name}={written(value)}" for name, value in self.settings.items())
        return f"{self.name}:{settings}" if settings else self.name

    @property
    def title(self) -> str:
        """The name in tables."""
        return ", ".join([self.name, *(f"{name}={written(value)}" for name, value in self.settings.items())])

    @property
    def family(self) -> tuple[str, str]:
        """Its name and its settings, without the knob: the title of its line in a plot."""
        others = [f"{name}={written(value)}" for name, value in self.settings.items() if name != self.knob]
        return self.name, ", ".join(others)

    @property
    def point(self) -> str:
        """The value of the knob: what a plot writes at the point."""
        return str(self.settings.get(self.knob, ""))

    @property
    def skipped_step(self) -> str:
        """The measured step of experiments/step_costs.csv that one skipped by it costs, or more than that."""
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

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise `UsageError` if it cannot be applied to this model, or if a package is missing."""

    def check_pipeline(self, pipe: Any) -> None:  # noqa: B027 (most need nothing of it)
        """Raise `UsageError` if it cannot be applied to this pipeline, for another reason than its denoiser."""

    def check_turns(self, models: Sequence[nn.Module]) -> None:
        """Raise `UsageError` if it cannot be applied to all these denoisers, which take turns in a generation."""
        if len(models) > 1 and self.counts_all_steps:
            raise UsageError(
                f"{self.text!r} cannot be used with {len(models)} denoisers that take turns, as this pipeline has: it "
                "counts the steps of one. Leave it out, or use first-block-cache or taylorseer."
            )
        for model in models:
            self.check(model)

    def check_on(self, pipe_or_model: Any) -> None:
        """Raise `UsageError` if it cannot be applied to a pipeline; of a model alone only what that says is checked."""
        self.check_turns(find_denoisers(pipe_or_model))
        if not isinstance(pipe_or_model, nn.Module):
            self.check_pipeline(pipe_or_model)

    def sentence(self, steps: int) -> str:
        """What it does in a run of so many steps, for users."""
        settings = ", ".join(f"{name}={written(value)}" for name, value in self.settings.items())
        return f"The cache {self.name} is on ({settings}): it skips what changes little."

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


def check_known(shortcut: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise if there is a setting of another name."""
    for name in settings:
        if name not in known:
            raise UsageError(f"{name!r} is not a setting of {shortcut}: {listed(known)}.{hint(name, known)}")


@contextmanager
def forwards_restored(model: nn.Module) -> Iterator[None]:
    """Remove what caches leave behind: a `forward` in the place of the class's own, which a copy would share."""
    untouched = [module for module in model.modules() if "forward" not in vars(module)]
    try:
        yield
    finally:
        for module in untouched:
            vars(module).pop("forward", None)
