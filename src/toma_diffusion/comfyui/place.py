"""Reads from ComfyUI's `transformer_options` which step, and which pass over it, a call of the model is."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from toma_diffusion.comfyui.families.base import Options

ROUNDING = 1e-5
"""Samplers compute noise levels that are meant to be listed ones: closer than this, relatively, they are."""

PassKey = tuple[tuple[Any, ...], tuple[int, ...]]
"""The conditionings of a pass, and what each is for: the negative prompt may get the area of a positive one, and then
both have the same `uuid`."""


@dataclass(frozen=True)
class Place:
    """The place of a call in a generation."""

    step: int
    """From 0."""
    num_steps: int
    pass_index: int
    """Which pass over the step it is. The same conditionings have the same number in every step."""
    parts: int
    """Of how many parts the batch consists that are the same pictures with other prompts; 1 if that is not certain."""
    begins: bool
    """Whether it is the first call of a generation."""
    repeats: bool
    """Whether it begins another evaluation by the sampler in the same step."""


class PlaceReader:
    """Reads the places of calls, in the order in which they come.

    A step is recognised by the noise level, `sigmas`: it is the last of `sample_sigmas` that is not below it. So the
    second call of a sampler that looks at a level between two steps belongs to the step before, and one that looks
    ahead at the next level belongs to the next step. A pass is recognised by its conditionings, `uuids`, and by their
    number in `cond_or_uncond`.
    """

    def __init__(self) -> None:
        self.levels: list[float] = []
        """The noise levels of the schedule."""
        self.passes: set[int] = set()
        """The ordinals of the passes of this evaluation."""
        self._schedule: Any = None
        """The tensor `sample_sigmas` that was last seen."""
        self._noise: tuple[Any, float] = (None, 0.0)
        """The tensor `sigmas` that was last seen, and its value."""
        self._step = -1
        self._begins_evaluation = False
        """Whether the next call is the first of an evaluation."""
        self._ordinals: dict[tuple[PassKey, int], int] = {}
        """By the pass, and how many of the same step had its conditionings before."""
        self._seen: dict[PassKey, int] = {}
        """How often conditionings were passed in this step."""

    def begin_evaluation(self) -> None:
        self.passes = set()
        self._begins_evaluation = True

    def repeat_evaluation(self) -> None:
        """The next calls take the place of those of this evaluation, which is the only one of its step so far."""
        self.passes = set()
        self._seen.clear()

    def read(self, options: Options) -> Place:
        """The place of the next call. A noise level is read from its tensor once, as samplers do themselves."""
        schedule = options["sample_sigmas"]
        if schedule is not self._schedule:
            self._schedule, self.levels, self._step = schedule, schedule.tolist(), -1
        step = step_of(self._level(options["sigmas"]), self.levels)
        begins = self._step < 0 or step < self._step
        repeats = self._begins_evaluation and step == self._step
        self._begins_evaluation = False
        if begins:
            self._ordinals.clear()
        if step != self._step:
            self._seen.clear()
        self._step = step
        key = tuple(options["uuids"]), tuple(options["cond_or_uncond"])
        times = self._seen[key] = self._seen.get(key, -1) + 1
        pass_index = self._ordinals.setdefault((key, times), len(self._ordinals))
        self.passes.add(pass_index)
        return Place(step, num_steps(self.levels), pass_index, parts_of(options["cond_or_uncond"]), begins, repeats)

    def _level(self, noise: Any) -> float:
        if noise is not self._noise[0]:
            self._noise = noise, float(noise.flatten()[0])
        return self._noise[1]


def missing(options: Options) -> list[str]:
    """What `transformer_options` lack that a place is read from."""
    return [name for name in ("sigmas", "sample_sigmas", "cond_or_uncond", "uuids") if options.get(name) is None]


def num_steps(levels: Sized) -> int:
    return max(1, len(levels) - 1)


def step_of(level: float, levels: list[float]) -> int:
    """The step that a noise level belongs to. A schedule that adds noise, to invert a picture, is read in reverse."""
    sign = 1 if levels[0] >= levels[-1] else -1
    slack = ROUNDING * abs(level)
    reached = [step for step in range(num_steps(levels)) if sign * (levels[step] - level) >= -slack]
    return reached[-1] if reached else 0


def parts_of(cond_or_uncond: list[int]) -> int:
    """Conditional and unconditional halves of one batch are the same pictures. Several conditionings of a kind may be
    for other areas of them."""
    return len(cond_or_uncond) if len(set(cond_or_uncond)) == len(cond_or_uncond) else 1
