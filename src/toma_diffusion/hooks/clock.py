"""The step clock: which step of which generation a call of the denoiser belongs to.

Schedulers cannot be asked: some count only after their first step, some not at all, and reading a timestep would wait
for the device. What can always be seen, without touching any value, is which tensors are passed, and their shapes:

- A call is **another pass over the same step** if it gets the same sample with a conditioning not seen in this step
  (separate CFG passes) or, inside a pipeline, a sample of another shape (skip-layer guidance). Anything else begins a
  new step, so that a plain loop over a denoiser counts every call.
- A **new generation** begins when the pipeline's scheduler got new timesteps, or when all its steps are done. Without a
  pipeline it begins when the first pass comes with another conditioning.
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
    def knows_number_of_steps(self) -> bool:
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
            self._timesteps, self._conditioning = _Identity(timesteps), _Identity(conditioning)
        if self._is_new_step(sample, conditioning):
            self._step += 1
            self._passes.clear()
        self._passes.append((_Identity(sample), _Identity(conditioning), tuple(sample.shape)))
        return Tick(self._step, num_steps, len(self._passes) - 1)

    def _ask_pipeline(self) -> tuple[Any, int | None]:
        pipeline = self._pipeline() if self._pipeline is not None else None
        timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        if timesteps is None:
            return None, None
        # A pipeline that starts late (image to image) or ends early notes how many it really makes.
        return timesteps, getattr(pipeline, "_num_timesteps", None) or len(timesteps)

    def _is_new_generation(
        self, timesteps: Any, num_steps: int | None, sample: Tensor, conditioning: Tensor | None
    ) -> bool:
        if self._step < 0:
            return True
        if timesteps is not None:
            exhausted = num_steps is not None and self._step + 1 >= num_steps
            return not self._timesteps.holds(timesteps) or (exhausted and self._is_new_step(sample, conditioning))
        return self._is_new_step(sample, conditioning) and not self._conditioning.holds(conditioning)

    def _is_new_step(self, sample: Tensor, conditioning: Tensor | None) -> bool:
        if not self._passes:
            return True
        first_sample, _, first_shape = self._passes[0]
        if not first_sample.holds(sample) and (tuple(sample.shape) == first_shape or not self.knows_number_of_steps):
            return True
        return any(known.holds(sample) and given.holds(conditioning) for known, given, _ in self._passes)


class _Identity:
    """Remembers an object without keeping it alive."""

    def __init__(self, value: Any) -> None:
        self._reference = None if value is None else weakref.ref(value)

    def holds(self, value: Any) -> bool:
        """Whether `value` is that very object."""
        return (None if self._reference is None else self._reference()) is value
