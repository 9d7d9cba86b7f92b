"""What the generations have in common that are learned from, and the steps that learning begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.skip.config import BySteps
from toma_diffusion.skip.denoiser import Skipper
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights
from toma_diffusion.skip.levels import Levels
from toma_diffusion.skip.prior import predicted
from toma_diffusion.skip.recording import Trajectory
from toma_diffusion.skip.schedule import computed_steps


@dataclass(frozen=True)
class About:
    """What generations have in common."""

    model_class: str
    num_steps: int
    passes: int
    levels: Levels | None
    scheduler: str
    guidance: float | None

    @classmethod
    def of(cls, skippers: Sequence[Skipper], trajectory: Trajectory) -> About:
        """As the last generation noted it."""
        generation = max((skipper.generation for skipper in skippers), key=lambda each: each.number)
        name = type(skippers[0].model).__name__
        return cls(name, *trajectory.kind, generation.levels, generation.scheduler, generation.guidance)

    def prior(self, history: Sequence[int], step: int) -> Weights:
        return predicted(self.levels, history, step)

    def learned(self, steps: Sequence[LearnedSteps]) -> Learned:
        return Learned(
            model_class=self.model_class,
            num_steps=self.num_steps,
            passes=self.passes,
            scheduler=self.scheduler,
            guidance=self.guidance,
            angles=() if self.levels is None else self.levels.angles,
            steps=tuple(steps),
        )

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"levels": None if self.levels is None else dict(vars(self.levels))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> About:
        levels = values["levels"]
        return cls(**{**values, "levels": None if levels is None else Levels(**levels)})


def lists_of(wanted: Sequence[BySteps], whole: Trajectory, levels: Levels | None) -> dict[int, tuple[int, ...]]:
    """The steps to begin with, by their number, most first.

    Args:
        wanted: what says how many steps are computed, or which.
        whole: a generation of the kind that is learned from.
        levels: its noise levels.
    """
    found: dict[int, tuple[int, ...]] = {}
    num_steps = whole.num_steps
    skips = [skip for by_steps in wanted if (skip := by_steps(num_steps)) is not None]
    for skip in sorted(skips, key=lambda each: isinstance(each.computed, tuple)):  # lists of one's own count most
        if (count := skip.count(num_steps)) < num_steps:
            computed = computed_steps(replace(skip, learned=None), num_steps, levels)
            found[count] = with_required(computed, whole.required)
    if not found:
        raise UsageError(
            f"all {num_steps} steps would be computed: there is nothing to learn. Learn with more steps, or say how "
            "many are computed."
        )
    return dict(sorted(found.items(), reverse=True))


def with_required(computed: tuple[int, ...], required: Sequence[int]) -> tuple[int, ...]:
    """The same number of steps, with the first step of every denoiser among them."""
    for step in required:
        if step not in computed:
            free = [each for each in computed if each not in required and each != 0]
            if not free:
                raise UsageError(
                    f"{len(computed)} computed steps are too few: each of the {len(required)} denoisers computes its "
                    "first."
                )
            nearest = min(free, key=lambda each: abs(each - step))
            computed = tuple(sorted({*computed, step} - {nearest}))
    return computed
