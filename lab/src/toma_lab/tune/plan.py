"""The settings of a search. They are saved in its folder: a search of other settings is another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toma_diffusion.api import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.evaluation.plan import Item, Variant
from toma_lab.evaluation.variants import count_blocks
from toma_lab.pipelines.clips import ClipRequest
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.tune.budget import Budget, find_budget
from toma_lab.tune.prompts import items_of


@dataclass(frozen=True, kw_only=True)
class TunePlan:
    """All settings of a search but the goal, which may change: what was measured is used again."""

    model: str
    model_class: str
    """Of the denoiser."""
    prompts: tuple[str, ...]
    steps: int
    guidance: float | None = None
    """None, here and below: the default of the pipeline."""
    width: int | None = None
    height: int | None = None
    clips: bool = False
    """Whether its images are clips, which have the three fields below."""
    frames: int | None = None
    fps: float | None = None
    image: str = ""
    """Name and hash of the image that all clips begin with, if they do."""
    dtype: str = ""
    weights: str = ""
    """Fingerprint of the model's weights."""
    budget: str = "small"
    compile: str = "none"
    methods: tuple[str, ...] = ()
    """The user's own candidates. Empty: those of the package."""
    lpips: str = ""
    """Name and hash of its weights. Empty: it is not measured."""

    @property
    def size(self) -> Budget:
        """How much is measured. The user's own candidates are not changed."""
        budget = find_budget(self.budget, clips=self.clips)
        return replace(budget, climbs=0) if self.methods else budget

    @property
    def thing(self) -> str:
        """What is generated: `image` or `clip`."""
        return "clip" if self.clips else "image"

    @property
    def items(self) -> list[Item]:
        """The images of the search."""
        return items_of(self.prompts, self.size.images)[: self.size.rungs[-1]]

    @property
    def final_items(self) -> list[Item]:
        """The images of the finalists: others than those of the search."""
        return items_of(self.prompts, self.size.images)[self.size.rungs[-1] :]

    def request(self, variant: Variant, item: Item, image: Path | None = None) -> ImageRequest:
        """One image or clip. Where the image is that it begins with, the plan does not say: a path is private."""
        steps = variant.requested_steps(self.steps)
        common = (item.prompt, item.seed, steps, self.guidance, self.width, self.height)
        if not self.clips:
            return ImageRequest(*common)
        return ClipRequest(*common, frames=self.frames, fps=self.fps, image=image)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TunePlan:
        """The inverse of `to_dict`."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**read)


def class_of_denoisers(pipe: Any) -> str:
    """The class of a pipeline's denoisers. Raises `UsageError` if they are not alike: a setting is for one kind."""
    models = find_denoisers(pipe)
    kinds = {f"{type(model).__name__} with {count_blocks(model)} transformer blocks": model for model in models}
    if len(kinds) > 1:
        raise UsageError(
            f"a {type(pipe).__name__} has denoisers of different kinds ({', '.join(kinds)}), for which one setting "
            "cannot be found: give a pipeline with one of them."
        )
    return type(models[0]).__name__
