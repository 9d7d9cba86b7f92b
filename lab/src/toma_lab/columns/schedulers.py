"""Makes another scheduler of diffusers from that of a pipeline: the same noise and prediction, another solver.

Align Your Steps (Sabour et al. 2024, arXiv 2404.14507) are noise levels that were optimised for one model each.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from toma_diffusion.errors import UsageError

DIFFUSION = (
    *("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "DEISMultistepScheduler"),
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler"),
    *("DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "UniPCMultistepScheduler"),
)
"""Schedulers of one family: they have the same settings of noise and prediction."""
FLOW = ("FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Those of flow models; the last two only if they are set to it."""
MULTISTEP: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dpmpp-2m": {"algorithm_type": "dpmsolver++", "solver_type": "midpoint", "solver_order": 2},
        "unipc": {"predict_x0": True, "solver_type": "bh2", "solver_order": 2},
    }
)
"""What makes a scheduler of diffusers this solver."""
CLASSES: Mapping[str, str] = MappingProxyType(
    {"dpmpp-2m": "DPMSolverMultistepScheduler", "unipc": "UniPCMultistepScheduler"}
)
SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
"""Settings of diffusers that space the steps."""
TRAINED_WITH = MappingProxyType({"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012})
"""The noise of both models."""
PUBLISHED: Mapping[str, str] = MappingProxyType(
    {"StableDiffusionXL": "StableDiffusionXLSigmas", "StableDiffusion": "StableDiffusionSigmas"}
)
"""The lists in diffusers, by the beginning of the pipeline's name; the first that fits."""
OTHER_MODELS = ("StableDiffusion3", "StableDiffusionImageVariation", "StableDiffusionUpscale")
WIDTH_OF_STABLE_DIFFUSION_2 = 1024
"""Of its text embeddings. It has the same pipeline as Stable Diffusion 1.5, and no list."""
SMALLEST_SHARE_OF_IMAGE = 1e-6
"""In the first step of a flow model. The logarithm of none is not finite."""


def is_flow(scheduler: Any) -> bool:
    """Whether it is the scheduler of a flow model, whose noise levels go from 1 to 0."""
    name = type(scheduler).__name__
    return name == FLOW[0] or (name in FLOW and bool(scheduler.config.get("use_flow_sigmas")))


def other_scheduler(text: str, pipe: Any, name: str, spacing: str) -> Any:
    """The solver of that name for a pipeline, made from the settings of its scheduler.

    Args:
        text: what the user wrote, for errors.
        name: one of `CLASSES`.
        spacing: `own`, as diffusers spaces the steps of that solver; or `ays`, Align Your Steps.

    Raises:
        UsageError: The pipeline cannot have it, or has it already.
    """
    own: Any = getattr(pipe, "scheduler", None)
    _check_own(text, pipe, own)
    if spacing == "own" and _is_own(own, name):
        raise UsageError(
            f"{text!r} is what this {type(pipe).__name__} does already: write steps:8 for fewer steps, "
            "timesteps:computed=(…) for some of them, or another solver or spacing."
        )
    return _for_flow(text, own, name, spacing) if is_flow(own) else _for_diffusion(text, pipe, name, spacing)


def _check_own(text: str, pipe: Any, own: Any) -> None:
    kind = type(own).__name__
    if kind not in (*DIFFUSION, *FLOW):
        raise UsageError(
            f"{text!r} cannot be used with a {kind}, the scheduler of this {type(pipe).__name__}: its settings mean "
            "nothing to other solvers. Leave it out."
        )
    for setting, usual in (("timestep_type", "discrete"), ("invert_sigmas", False), ("stochastic_sampling", False)):
        value = own.config.get(setting, usual)
        if value != usual:
            raise UsageError(
                f"{text!r} cannot be used with a {kind} that has {setting}={value!r}: other solvers do not know it. "
                "Leave it out."
            )


def _is_own(own: Any, name: str) -> bool:
    """Whether the pipeline has that solver."""
    is_same = all(own.config.get(field) == value for field, value in MULTISTEP[name].items())
    return type(own).__name__ == CLASSES[name] and is_same


def _for_diffusion(text: str, pipe: Any, name: str, spacing: str) -> Any:
    import diffusers

    own = pipe.scheduler
    if own.config.get("clip_sample"):
        raise UsageError(
            f"{text!r} cannot be used with a {type(own).__name__} that has clip_sample=True: {CLASSES[name]} cannot "
            "clip. Leave it out."
        )
    changes = dict(MULTISTEP[name]) | ({} if spacing == "own" else dict.fromkeys(SPACINGS, False))
    made = _from_config(getattr(diffusers, CLASSES[name]), own.config, changes)
    if spacing == "ays":
        made.published = _published_levels(text, pipe)
        kind: Any = type(made)
        made.__class__ = _aligned(kind)
    return made


def _for_flow(text: str, own: Any, name: str, spacing: str) -> Any:
    import diffusers

    if spacing == "ays":
        raise UsageError(
            f"{text!r} cannot be used with a flow model: Align Your Steps are published for Stable Diffusion 1.5 and "
            "SDXL only. Write spacing=own."
        )
    levels = copy.deepcopy(own)
    if type(own).__name__ != FLOW[0]:
        kind: Any = diffusers.FlowMatchEulerDiscreteScheduler
        levels = _from_config(kind, own.config, {"shift": own.config.get("flow_shift", 1.0)})
    kind = getattr(diffusers, CLASSES[name])
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "use_dynamic_shifting": False}
    made = kind(num_train_timesteps=own.config.num_train_timesteps, **flow, **MULTISTEP[name])
    made.levels = levels
    made.__class__ = _with_levels_of_flow(kind)
    return made


def _from_config(kind: Any, config: Any, changes: Mapping[str, Any]) -> Any:
    """With those settings and changes that this class has: diffusers warns of others."""
    taken = inspect.signature(kind.__init__).parameters
    known = {name: value for name, value in config.items() if name in taken or name == "_use_default_values"}
    return kind.from_config(known, **{name: value for name, value in changes.items() if name in taken})


@cache
def _aligned(kind: Any) -> Any:
    """The same scheduler, with the published noise levels."""

    class Aligned(kind):  # type: ignore[misc]
        def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
            super().set_timesteps(num_inference_steps, device)
            _align(self, num_inference_steps, device)

    return named_like(Aligned, kind)


def _align(scheduler: Any, steps: int, device: Any) -> None:
    known = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).sqrt().numpy()
    levels = _levels_of(steps, scheduler.published, float(known[0]))
    timesteps = np.interp(np.log(levels[:-1]), np.log(known), np.arange(len(known)))
    scheduler.sigmas = torch.from_numpy(levels.astype(np.float32))
    scheduler.timesteps = torch.from_numpy(timesteps.astype(np.float32)).to(device)


def _published_levels(text: str, pipe: Any) -> list[float]:
    """The published noise levels of ten steps, with the end at 0. Raises `UsageError` if there are none for the model.

    Args:
        text: what the user wrote.
    """
    from diffusers.schedulers import AysSchedules

    name, config = type(pipe).__name__, pipe.scheduler.config
    found = next((key for start, key in PUBLISHED.items() if name.startswith(start)), None)
    is_trained_so = all(config.get(field) == value for field, value in TRAINED_WITH.items())
    is_like_them = is_trained_so and config.get("prediction_type") == "epsilon" and not name.startswith(OTHER_MODELS)
    width = getattr(getattr(pipe, "unet", None), "config", {}).get("cross_attention_dim")
    if found is None or not is_like_them or width == WIDTH_OF_STABLE_DIFFUSION_2:
        raise UsageError(
            f"{text!r} cannot be used with this {name}: Align Your Steps are published for Stable Diffusion 1.5 and "
            "SDXL only, which predict noise. Write spacing=own."
        )
    return list(AysSchedules[found])


def _levels_of(steps: int, published: Sequence[float], smallest: float) -> np.ndarray:
    """The noise levels of so many steps: on straight lines between the logarithms of the published ones.

    Args:
        published: with the end at 0.
        smallest: the smallest level that the model knows, in place of 0 until the lines are drawn.
    """
    known = np.log([*published[:-1], smallest])
    places = np.linspace(0, len(known) - 1, steps + 1)
    levels: np.ndarray = np.exp(np.interp(places, np.arange(len(known)), known))
    levels[-1] = 0
    return levels


@cache
def _with_levels_of_flow(kind: Any) -> Any:
    """The same multistep scheduler, with noise levels that are shifted as the pipeline's own are."""

    class OfFlow(kind):  # type: ignore[misc]
        def set_timesteps(
            self,
            num_inference_steps: int | None = None,
            device: Any = None,
            sigmas: Any = None,
            mu: float | None = None,
        ) -> None:
            steps = len(sigmas) if num_inference_steps is None else num_inference_steps
            super().set_timesteps(steps, device)
            _shift(self, steps, device, sigmas, mu)

    return named_like(OfFlow, kind)


def _shift(scheduler: Any, steps: int, device: Any, sigmas: Any, mu: float | None) -> None:
    if sigmas is None:  # as diffusers spaces these solvers for flow models
        sigmas = np.linspace(1, 1 / scheduler.config.num_train_timesteps, steps + 1)[:-1]
    scheduler.levels.set_timesteps(steps, device, sigmas=sigmas, mu=mu)
    scheduler.timesteps = scheduler.levels.timesteps
    scheduler.sigmas = scheduler.levels.sigmas.clamp(max=1 - SMALLEST_SHARE_OF_IMAGE).cpu()


def named_like(changed: Any, kind: Any) -> Any:
    """A pipeline notes the name of its scheduler."""
    changed.__name__, changed.__module__ = kind.__name__, kind.__module__
    return changed
