"""What is skipped, in plain words: as planned, or as it was in the last generation."""

from __future__ import annotations

from dataclasses import dataclass

from toma_diffusion.skip.config import BySteps, Skip
from toma_diffusion.skip.generation import Generation

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


def summarize(by_steps: BySteps, generation: Generation, counts: tuple[int, int], num_bytes: int) -> SkipSummary:
    """Of one denoiser. `counts`: how many steps were computed, and how many predicted."""
    return SkipSummary(*counts, generation.computed, num_bytes, _lines(by_steps, generation, counts, num_bytes))


def _lines(by_steps: BySteps, generation: Generation, counts: tuple[int, int], num_bytes: int) -> tuple[str, ...]:
    computed, predicted = counts
    skip = generation.skip
    if not computed:
        return _planned(by_steps)
    if not predicted or skip is None:
        return (f"all {computed} steps of the last generation were computed",)
    which = "" if generation.computed is None else f" ({', '.join(map(str, generation.computed))})"
    return (
        f"{computed} of {computed + predicted} steps were computed{which}, {predicted} skipped and predicted",
        _prediction(skip, generation),
        f"the outputs that are kept take {num_bytes / 2**20:.1f} MiB",
    )


def _planned(by_steps: BySteps) -> tuple[str, ...]:
    skip = by_steps(USUAL_STEPS)
    if skip is None:
        return ()
    others = "the others are skipped and predicted"
    if isinstance(skip.computed, tuple):
        return (f"steps {', '.join(map(str, skip.computed))} are computed, {others}",)
    count = skip.count(USUAL_STEPS)
    return (f"{count} of {USUAL_STEPS} steps are computed, {USUAL_STEPS - count} skipped and predicted",)


def _prediction(skip: Skip, generation: Generation) -> str:
    if skip.learned is not None:
        return "predicted with weights that were learned on the model"
    if generation.levels is None:
        return "predicted: the last output as it was, because the noise levels of this scheduler are not known"
    if generation.levels.holds_image:
        return "predicted: the clean image stays as the last computed step saw it"
    return "predicted: noise and clean image stay nearly as the last computed step saw them"
