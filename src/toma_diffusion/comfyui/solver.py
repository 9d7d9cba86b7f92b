"""What skipped steps need to know of the sampler and of the model's noise levels.

ComfyUI gives a model the noisy latent as its `model_sampling` scales it, and computes the denoised latent from what the
model returns. Both follow from one base class of `model_sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toma_diffusion.skip.levels import FLOW, IMAGE, NOISE, VELOCITY, Levels

PREDICTIONS: Mapping[str, tuple[str, float]] = {
    "EPS": (NOISE, 1.0),
    "V_PREDICTION": (VELOCITY, 1.0),
    "EDM": (VELOCITY, -1.0),
    "X0": (IMAGE, 1.0),
    "CONST": (FLOW, 1.0),
    "COSMOS_RFLOW": (FLOW, 1.0),
}
"""By the names of ComfyUI's classes: what a model predicts, and the sign of it."""
SEVERAL = frozenset(
    {
        "dpm_2",
        "dpm_2_ancestral",
        "dpm_adaptive",
        "dpm_fast",
        "dpmpp_2s_ancestral",
        "dpmpp_2s_ancestral_cfg_pp",
        "dpmpp_sde",
        "dpmpp_sde_gpu",
        "exp_heun_2_x0",
        "exp_heun_2_x0_sde",
        "heun",
        "heunpp2",
        "sa_solver_pece",
        "seeds_2",
        "seeds_3",
    }
)
"""Samplers that evaluate the model several times a step. Others that do are recognised when they do it."""
ON_NOISE = frozenset(
    {"euler", "euler_cfg_pp", "lms", "ipndm", "ipndm_v", "deis", "gradient_estimation", "gradient_estimation_cfg_pp"}
)
"""Samplers that add no fresh noise, and work on the noise: it is the same over skipped steps, and so is the image."""
ON_IMAGE = frozenset({"dpmpp_2m", "dpmpp_2m_cfg_pp", "res_multistep", "res_multistep_cfg_pp", "unipc", "unipc_bh2"})
"""Samplers of a higher order that add no fresh noise, and work on the denoised latent. Any other sampler may add noise:
then the image alone is the same over skipped steps."""


def read_levels(model_sampling: Any, sigmas: Sequence[float], sampler: str) -> Levels | None:
    """The noise levels of the steps from every one of `sigmas` to the next. None if they are not known."""
    classes = (each.__name__ for each in type(model_sampling).__mro__)
    name = next((each for each in classes if each in PREDICTIONS), None)
    if name is None or not all(map(math.isfinite, sigmas)):
        return None
    prediction, sign = PREDICTIONS[name]
    if name == "CONST":
        angles = [math.atan2(sigma, 1 - sigma) for sigma in sigmas]
    else:
        image = 1.0 if prediction == FLOW else float(getattr(model_sampling, "sigma_data", 1.0))
        angles = [math.atan(sigma / image) for sigma in sigmas]
    holds_noise = sampler in ON_NOISE or (prediction == FLOW and sampler in ON_IMAGE)
    return Levels(tuple(angles[: max(1, len(sigmas) - 1)]), prediction, sign, not holds_noise)
