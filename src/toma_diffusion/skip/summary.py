"""What is skipped, in plain words: as planned, or as it was in the last generation."""

from __future__ import annotations

from dataclasses import dataclass

from toma_diffusion.skip.config import BySteps, Skip
from toma_diffusion.skip.generation import Decisions, Generation

USUAL_STEPS = 20
"""What presets are described for before a generation has told its number of steps."""


@dataclass(frozen=True)
class SkipSummary:
    """What is skipped: as it was in the last generation, or as planned."""

    num_computed: int
    """Steps of the last generation that were computed; 0 before the first."""
    num_predicted: int
    computed: tuple[int, ...] | None
    """Which steps of the last generation were to be computed; None: all."""
    num_bytes: int
    """Memory held by the outputs that skipped steps are predicted from."""
    lines: tuple[str, ...]
    """In plain words."""


def summarize(
    by_steps: BySteps, generation: Generation, decisions: Decisions, num_bytes: int, num_steps: int | None
) -> SkipSummary:
    """Of one denoiser. `num_steps`: those of the generations to come, if they are known."""
    lines = _lines(by_steps, generation, decisions, num_bytes, num_steps)
    return SkipSummary(*decisions.counts, generation.computed, num_bytes, lines)


def _lines(
    by_steps: BySteps, generation: Generation, decisions: Decisions, num_bytes: int, num_steps: int | None
) -> tuple[str, ...]:
    computed, predicted = decisions.counts
    skip = generation.skip
    if not computed:
        return _planned(by_steps, num_steps or USUAL_STEPS)
    if not predicted or skip is None:
        return (f"all {computed} steps of the last generation were computed",)
    which = ", ".join(map(str, decisions.computed))
    return (
        f"{computed} of {computed + predicted} steps were computed ({which}), {predicted} skipped and predicted",
        _prediction(skip, generation),
        f"the outputs that are kept take {num_bytes / 2**20:.1f} MiB",
    )


def _planned(by_steps: BySteps, num_steps: int) -> tuple[str, ...]:
    skip = by_steps(num_steps)
    if skip is None:
        return ()
    others = "the others are skipped and predicted"
    if isinstance(skip.computed, tuple):
        return (f"steps {', '.join(map(str, skip.computed))} are computed, {others}",)
    count = skip.count(num_steps)
    if count == num_steps:
        return (f"{skip.computed} steps are computed, {others}",)
    return (f"{count} of {num_steps} steps are computed, {num_steps - count} skipped and predicted",)


def _prediction(skip: Skip, generation: Generation) -> str:
    if skip.learned is not None:
        return "predicted with weights that were learned on the model"
    if generation.levels is None:
        return "predicted: the last output as it was, because the noise levels of this scheduler are not known"
    if generation.levels.holds_image:
        return "predicted: the clean image stays as the last computed step saw it"
    return "predicted: noise and clean image stay nearly as the last computed step saw them"
