"""The settings of a search, saved in its folder, and how much it measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from toma_diffusion.checks import check_one_of
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.ours import count_blocks
from toma_lab.plan import Item, Plan
from toma_lab.rows import Row


@dataclass(frozen=True)
class Budget:
    """The size of every stage."""

    learning: int
    """How long other steps and weights are tried in learning to predict skipped steps: as long as so many images
    take."""
    rungs: tuple[int, ...]
    """Images, or clips, of each candidate after every rung of the search. After each about half of the candidates go
    on."""
    climbs: int
    """Rounds in which the computed steps of the best candidate that skips steps are moved."""
    finalists: int
    """Candidates that are measured on images of their own at the end."""
    final_images: int
    """How many images those are."""

    def generated(self, candidates: int) -> int:
        """About how many images a search generates, without learning. The original runs beside every two candidates."""
        measured, before, alive = self.finalists * self.final_images, 0, candidates
        for images in self.rungs:
            measured += alive * (images - before)
            before, alive = images, max(self.finalists, (alive + 1) // 2)
        return round(1.5 * measured)


BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "small": Budget(4, rungs=(1, 2, 4), climbs=1, finalists=3, final_images=4),
        "medium": Budget(20, rungs=(1, 2, 4), climbs=2, finalists=5, final_images=8),
        "large": Budget(80, rungs=(2, 4, 8), climbs=4, finalists=8, final_images=24),
    }
)
CLIP_BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "small": Budget(0, rungs=(1,), climbs=0, finalists=3, final_images=1),
        "medium": Budget(4, rungs=(1, 2), climbs=1, finalists=4, final_images=2),
        "large": Budget(12, rungs=(1, 2, 4), climbs=2, finalists=6, final_images=4),
    }
)
"""The same of clips, each of which takes as long as many images."""


def find_budget(name: str, *, clips: bool = False) -> Budget:
    """The budget of that name, of images or of clips."""
    check_one_of("budget", name, tuple(BUDGETS))
    return (CLIP_BUDGETS if clips else BUDGETS)[name]


@dataclass(frozen=True, kw_only=True)
class TunePlan(Plan):
    """All settings of a search but the goal, which may change: what was measured is used again."""

    model_class: str
    """Of the denoiser."""
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
        return self._all_items()[: self.size.rungs[-1]]

    @property
    def final_items(self) -> list[Item]:
        """The images of the finalists: others than those of the search."""
        return self._all_items()[self.size.rungs[-1] :]

    def _all_items(self) -> list[Item]:
        """If there are fewer prompts, they come again with another seed."""
        count, total = len(self.prompts), self.size.rungs[-1] + self.size.final_images
        return [Item(n % count, self.prompts[n % count], seed=n // count) for n in range(total)]

    def cells(self) -> Row:
        return super().cells() | {"compile": self.compile, "budget": self.budget, "lpips_weights": self.lpips}


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
