"""The step clock: which step of which generation a call of the denoiser belongs to.

Schedulers cannot be asked: some count only after their first step, some not at all, and reading a timestep would wait
for the device. What can always be seen, without touching any value, is which tensors are passed, and their shapes:

- A call is **another pass over the same step** if it gets the same sample with a conditioning not seen in this step
  (separate CFG passes) or, inside a pipeline, a sample of another shape (skip-layer guidance). Anything else begins a
  new step, so that a plain loop over a denoiser counts every call.
- A **new generation** begins when the pipeline's scheduler got new timesteps. Where those say nothing (no pipeline is
  known, or another pipeline with a scheduler of its own shares the model), it begins with a new conditioning: at once
  without a pipeline, and with one if all its steps are done or the old conditioning no longer exists.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Tick:
    """Where a call stands."""

    step: int
    """From 0, in this generation."""
    num_steps: int | None
    """Steps of this generation, where a pipeline tells."""
    ordinal: int
    """Which pass over the step this is, from 0."""


class StepClock:
    """Counts steps by the identity of the tensors a denoiser is called with. Holds no tensor alive."""

    def __init__(self, pipeline: Any = None) -> None:
        self._pipeline = weakref.ref(pipeline) if pipeline is not None else None
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepClock:
        return StepClock()  # a copied model is in no pipeline that is known

    @property
    def has_pipeline(self) -> bool:
        """Whether there is a pipeline to ask."""
        return self._pipeline is not None and self._pipeline() is not None

    def reset(self) -> None:
        """Forget everything: the next call begins a new generation."""
        self._step = -1
        self._passes: list[tuple[_Identity, _Identity, tuple[int, ...]]] = []
        self._timesteps = _Identity(None)
        self._conditioning = _Identity(None)

    def tick(self, sample: Tensor, conditioning: Tensor | None) -> Tick:
        """Count one call of the denoiser."""
        timesteps, num_steps = self._ask_pipeline()
        if self._is_new_generation(timesteps, num_steps, sample, conditioning):
            self.reset()
            self._timesteps = _Identity(timesteps)
        if self._is_new_step(sample, conditioning):
            self._step += 1
            self._passes.clear()
            self._conditioning = _Identity(conditioning)
        self._passes.append((_Identity(sample), _Identity(conditioning), tuple(sample.shape)))
        return Tick(self._step, num_steps, len(self._passes) - 1)

    def _ask_pipeline(self) -> tuple[Any, int | None]:
        pipeline = self._pipeline() if self._pipeline is not None else None
        timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        if timesteps is None:
            return None, None
        # A pipeline that starts late (image to image) or ends early notes how many it really makes.
        return timesteps, getattr(pipeline, "num_timesteps", None) or len(timesteps)

    def _is_new_generation(
        self, timesteps: Any, num_steps: int | None, sample: Tensor, conditioning: Tensor | None
    ) -> bool:
        if self._step < 0 or not self._timesteps.holds(timesteps):
            return True
        if self._conditioning.holds(conditioning) or not self._is_new_step(sample, conditioning):
            return False
        if timesteps is None:
            return True
        exhausted = num_steps is not None and self._step + 1 >= num_steps
        # A batch that changes with its conditioning is guidance cut off half-way, not a new generation.
        return exhausted or (self._conditioning.is_gone and tuple(sample.shape) == self._passes[0][2])

    def _is_new_step(self, sample: Tensor, conditioning: Tensor | None) -> bool:
        if not self._passes:
            return True
        for known, given, shape in self._passes:
            if known.holds(sample):
                if given.holds(conditioning):
                    return True
            elif tuple(sample.shape) == shape or not self.has_pipeline:
                return True
        return False


class _Identity:
    """Remembers an object without keeping it alive."""

    def __init__(self, value: Any) -> None:
        self._reference = None if value is None else weakref.ref(value)

    def holds(self, value: Any) -> bool:
        """Whether `value` is that very object."""
        return value is None if self._reference is None else value is not None and self._reference() is value

    @property
    def is_gone(self) -> bool:
        """Whether the object no longer exists."""
        return self._reference is not None and self._reference() is None
