"""The noise levels of a generation, read from its scheduler.

A noisy sample, scaled to what the denoiser gets, is cos(a) · image + sin(a) · noise in models that preserve the
variance, with an angle a of every step: 0 is the clean image, π/2 noise alone. Flow models mix with σ and 1 − σ in
place of sine and cosine; the angle is then that of the same signal-to-noise ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toma_diffusion.errors import UsageError

NOISE, IMAGE, VELOCITY, FLOW = "noise", "image", "velocity", "flow"
_PREDICTIONS = {
    "epsilon": NOISE,
    "sample": IMAGE,
    "v_prediction": VELOCITY,
    "flow_prediction": FLOW,
}
_STOCHASTIC = (
    "Ancestral",
    "DDPM",
    "LCM",
    "TCD",
    "SASolver",
    "SDE",
    "CogVideoXDPM",
    "UnCLIP",
    "RePaint",
    "ConsistencyM",
)
"""Parts of the names of schedulers that add fresh noise."""
NOTHING = 1e-9
"""A share of image or noise below this is none."""
NEGATED = ("ZImage", "Lumina", "HiDream", "NucleusMoE")
"""Beginnings of the names of flow models whose pipelines change the sign of what they return."""


@dataclass(frozen=True)
class Levels:
    """The noise levels of a generation, and what its denoiser predicts."""

    angles: tuple[float, ...]
    """By step, in radians."""
    prediction: str
    """`noise`, `image`, `velocity` (cos(a) · noise − sin(a) · image) or `flow` (noise − image)."""
    sign: float = 1.0
    """−1 if the denoiser returns the opposite."""
    holds_image: bool = False
    """Whether only the image is the same after several steps of the solver that get the same prediction, not the noise:
    stochastic solvers, and those of a higher order that work on the image."""

    @property
    def log_signal_to_noise(self) -> list[float]:
        """The logarithm of cot(a), by step: −∞ for noise alone, ∞ for the clean image."""
        return [_log_cotangent(angle) for angle in self.angles]


def read_levels(scheduler: Any, first: int, num_steps: int, eta: float = 0.0, model_name: str = "") -> Levels | None:
    """The levels of `num_steps` steps from the `first` of the scheduler's. None if it is of a kind that is not known.

    Reads values of the scheduler's tensors: call it once in a generation.

    Args:
        scheduler: of diffusers, with its timesteps set; or `Levels`, which are returned as they are.
        eta: how much noise DDIM adds.
        model_name: the name of the denoiser's class.
    """
    if isinstance(scheduler, Levels):
        return scheduler
    check_one_evaluation(scheduler)
    config: Mapping[str, Any] = getattr(scheduler, "config", None) or {}
    name = type(scheduler).__name__
    is_flow = name.startswith("FlowMatch") or bool(config.get("use_flow_sigmas"))
    prediction = FLOW if is_flow else _PREDICTIONS.get(config.get("prediction_type", ""))
    angles = _angles(scheduler, config, is_flow or prediction == FLOW)
    if prediction is None or angles is None:
        return None
    angles = angles[first : first + num_steps]
    if len(angles) < num_steps or not all(map(math.isfinite, angles)):
        return None
    sign = 1.0
    if name.startswith("EDM") and prediction == NOISE:  # its "epsilon" is what the preconditioned network returns
        prediction, sign = VELOCITY, -1.0
    if prediction == FLOW and model_name.startswith(NEGATED):
        sign = -1.0
    adds_noise = (
        any(part in name for part in _STOCHASTIC)
        or str(config.get("algorithm_type", "")).startswith("sde")
        or bool(config.get("stochastic_sampling"))
        or eta > 0
    )
    on_image = config.get("algorithm_type") == "dpmsolver++" or bool(config.get("predict_x0"))
    return Levels(tuple(angles), prediction, sign, adds_noise or (on_image and prediction != FLOW))


def _log_cotangent(angle: float) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    if cosine < NOTHING or sine < NOTHING:
        return -math.inf if cosine < NOTHING else math.inf
    return math.log(cosine / sine)


def check_one_evaluation(scheduler: Any) -> None:
    """Raise `UsageError` if the scheduler evaluates the denoiser several times for a step."""
    several = getattr(scheduler, "order", 1) == 2 and hasattr(scheduler, "state_in_first_order")
    runge_kutta = (getattr(scheduler, "config", None) or {}).get("skip_prk_steps") is False
    if several or runge_kutta:
        instead = "skip_prk_steps=True" if runge_kutta else "DPMSolverMultistepScheduler, or merge tokens only"
        raise UsageError(
            f"{type(scheduler).__name__} evaluates the denoiser more than once a step, and none of these evaluations "
            f"can be skipped: use {instead}."
        )


def _angles(scheduler: Any, config: Mapping[str, Any], is_flow: bool) -> list[float] | None:
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is not None:
        values = [float(sigma) for sigma in sigmas.tolist()]
        if is_flow:
            return [math.atan2(sigma, 1 - sigma) for sigma in values]
        if hasattr(scheduler, "alphas_cumprod") or config.get("sigma_data"):
            return [math.atan(sigma / config.get("sigma_data", 1.0)) for sigma in values]
        return None
    alphas, timesteps = getattr(scheduler, "alphas_cumprod", None), getattr(scheduler, "timesteps", None)
    if alphas is None or timesteps is None:
        return None
    signal, count = alphas.tolist(), len(alphas)
    positions = [round(float(timestep)) for timestep in timesteps.tolist()]
    if not all(0 <= position < count for position in positions):
        return None
    return [math.acos(math.sqrt(min(1.0, signal[position]))) for position in positions]
