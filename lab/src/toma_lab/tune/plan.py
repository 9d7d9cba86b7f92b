"""The settings of a search. They are saved in its folder: a search of other settings is another one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns.ours import count_blocks
from toma_lab.plan import Item, Plan
from toma_lab.rows import Row
from toma_lab.tune.budget import Budget, find_budget


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
        count = len(self.prompts)
        return [Item(n % count, self.prompts[n % count], seed=n // count) for n in range(self.size.images)]

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
