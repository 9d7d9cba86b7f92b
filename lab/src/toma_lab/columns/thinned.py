"""A scheduler of diffusers that takes only some of its own steps, and takes each as far as the next of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, wraps
from itertools import pairwise
from typing import Any

import torch

from toma_lab.columns.schedulers import named_like

DDIM = ("DDIMScheduler", "CogVideoXDDIMScheduler")
"""These compute the end of a step from the number of steps, not from their list."""
BY_NOISE_LEVELS = (
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"),
    *("DPMSolverMultistepScheduler", "UniPCMultistepScheduler"),
)
"""These go from each noise level of their list to the next."""
KNOWN = (*DDIM, *BY_NOISE_LEVELS)


class Stride(int):
    """Stands for a number of steps: the training timesteps divided by it are the stride itself.

    DDIM of diffusers goes from timestep t to t - (training timesteps // number of steps). No number of steps gives
    every stride, and every step of a thinned list has its own.
    """

    def __rfloordiv__(self, timesteps: int) -> int:
        return int(self)


def thinned(scheduler: Any, computed: Sequence[int]) -> Any:
    """A copy that takes only these steps, counted from 0, of those that it is asked for.

    A step lands where the scheduler's own last step before the next computed one lands. So it changes the sample as if
    the predicted noise and image were held in between, and with all steps computed it is the scheduler as it is.

    Steps beyond the end are left out: to warm up, a pipeline may be asked for fewer.
    """
    thin = copy.deepcopy(scheduler)
    kind: Any = type(scheduler)
    thin.__class__ = _by_strides(kind) if kind.__name__ in DDIM else _by_noise_levels(kind)
    thin.computed = tuple(computed)
    return thin


@cache
def _by_noise_levels(kind: Any) -> Any:
    """The same scheduler, with a list that is thinned whenever it is made."""

    class Thinned(kind):  # type: ignore[misc]
        @wraps(kind.set_timesteps)  # pipelines look at its arguments
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            super().set_timesteps(*args, **kwargs)
            _thin_noise_levels(self)

    return named_like(Thinned, kind)


@cache
def _by_strides(kind: Any) -> Any:
    """The same for DDIM."""

    class Thinned(kind):  # type: ignore[misc]
        @wraps(kind.set_timesteps)
        def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
            super().set_timesteps(*args, **kwargs)
            self.strides = _thin_timesteps(self)

        @wraps(kind.step)
        def step(self, model_output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_inference_steps = self.strides[int(timestep)]
            return super().step(model_output, timestep, *args, **kwargs)

    return named_like(Thinned, kind)


def _kept(scheduler: Any) -> list[int]:
    return [step for step in scheduler.computed if step < len(scheduler.timesteps)]


def _thin_noise_levels(scheduler: Any) -> None:
    kept = _kept(scheduler)
    scheduler.timesteps = scheduler.timesteps[kept]
    scheduler.sigmas = torch.cat([scheduler.sigmas[kept], scheduler.sigmas[-1:]])
    scheduler.num_inference_steps = len(kept)


def _thin_timesteps(scheduler: Any) -> dict[int, Stride]:
    """Returns by its timestep how far each kept step goes: to the end of the last step before the next kept one."""
    kept, timesteps = _kept(scheduler), scheduler.timesteps.tolist()
    usual = scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    scheduler.timesteps = scheduler.timesteps[kept]
    return {
        timesteps[step]: Stride(timesteps[step] - timesteps[following - 1] + usual)
        for step, following in pairwise((*kept, len(timesteps)))
    }
