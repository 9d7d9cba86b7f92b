"""Presets: what is done in a generation, as a function of its number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from toma_diffusion.checks import hint, listed
from toma_diffusion.engine.clock import steps_unknown
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.variants import LATE
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.learned import Learned

DEFAULT = "balanced"


class Settings(NamedTuple):
    """What is done in a generation: tokens are merged, steps are skipped, or both."""

    merge: Merging | None = None
    skip: Skip | None = None


Preset = Callable[[int], Settings]


def balanced(num_steps: int) -> Settings:
    """Keeps pictures closest to the original: 12 of 20 steps are computed, the others predicted.

    With 4 steps or fewer there is nothing to skip: tokens are merged in the second half of them, not on small grids.
    """
    return Settings(merge=LATE) if num_steps <= 4 else _skipping(0.6, num_steps, fewest=6)


def fast(num_steps: int) -> Settings:
    """8 of 20 steps are computed."""
    return _skipping(0.4, num_steps, fewest=5)


def faster(num_steps: int) -> Settings:
    """6 of 20 steps are computed."""
    return _skipping(0.3, num_steps, fewest=4)


PRESETS: Mapping[str, Preset] = MappingProxyType({"balanced": balanced, "fast": fast, "faster": faster})
"""By name, the slowest and closest first."""
FEWEST_STEPS = 4
"""Of generations with fewer steps none is skipped: their outputs differ too much."""


def _skipping(share: float, num_steps: int, fewest: int) -> Settings:
    """The fewer steps a generation has, the more outputs differ from one to the next: a larger share is computed."""
    if num_steps < FEWEST_STEPS:
        return Settings()
    return Settings(skip=Skip(computed=max(1, min(max(round(share * num_steps), fewest), num_steps - 1))))


def named(name: str) -> Preset:
    if name not in PRESETS:
        raise UsageError(f"preset={name!r} is not known: {listed(PRESETS)}.{hint(name, PRESETS)}")
    return PRESETS[name]


MOST_STEPS = 100
"""A preset that merges at all does so in some generation of fewer steps."""


@dataclass(frozen=True)
class Chosen:
    """What a user chose: a preset, settings, or both: `merge` and `skip` take the place of what the preset has."""

    preset: Preset | None = None
    merge: Merging | None = None
    skip: Skip | None = None
    learned: Learned | None = None
    """How skipped steps are predicted."""

    def __post_init__(self) -> None:
        if self.learned is not None:
            self.skips_in(self.learned.num_steps)  # raises if it was learned for other settings

    @property
    def name(self) -> str | None:
        """Of the preset, if nothing takes the place of what it has."""
        return None if self.preset is None or self.merge or self.skip else self.preset.__name__

    @property
    def merging(self) -> Merging | None:
        """How tokens are merged, in those generations in which they are."""
        if self.merge is not None or self.preset is None:
            return self.merge
        return next((found for steps in range(1, MOST_STEPS) if (found := self.preset(steps).merge)), None)

    @property
    def ever_skips(self) -> bool:
        """Whether steps are skipped in any generation."""
        preset = self.preset
        return self.skip is not None or (
            preset is not None and any(preset(steps).skip is not None for steps in range(1, MOST_STEPS))
        )

    def merges_in(self, num_steps: int | None) -> bool:
        """Whether tokens are merged in generations of so many steps."""
        return self.merge is not None or self._of_preset(num_steps).merge is not None

    def skips_in(self, num_steps: int | None) -> Skip | None:
        """Which of so many steps are skipped."""
        skip = self._of_preset(num_steps).skip if self.skip is None else self.skip
        if self.learned is None:
            return skip
        if num_steps is not None and num_steps != self.learned.num_steps:  # the skipper refuses such a generation
            return Skip(computed=self.learned.counts[0], learned=self.learned)
        if skip is None:
            raise UsageError(
                f"learned is for {self.learned.num_steps} steps, and no step of {num_steps} is skipped here: pass "
                f"skip=Skip(computed={self.learned.counts[0]}) too."
            )
        return replace(skip, learned=self.learned)

    def _of_preset(self, num_steps: int | None) -> Settings:
        if self.preset is None:
            return Settings()
        if num_steps is None:
            raise steps_unknown("what a preset does depends on", "pass merge=Merge(…) or skip=Skip(computed=(0, …))")
        return self.preset(num_steps)
