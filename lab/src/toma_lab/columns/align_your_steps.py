"""Align Your Steps (Sabour et al. 2024, arXiv 2404.14507): noise levels that were optimised for one model each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from toma_diffusion.errors import UsageError

TRAINED_WITH = MappingProxyType({"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012})
"""The noise of both models."""
PUBLISHED: Mapping[str, str] = MappingProxyType(
    {"StableDiffusionXL": "StableDiffusionXLSigmas", "StableDiffusion": "StableDiffusionSigmas"}
)
"""The lists in diffusers, by the beginning of the pipeline's name; the first that fits."""
OTHER_MODELS = ("StableDiffusion3", "StableDiffusionImageVariation", "StableDiffusionUpscale")
WIDTH_OF_STABLE_DIFFUSION_2 = 1024
"""Of its text embeddings. It has the same pipeline as Stable Diffusion 1.5, and no list."""


def published_levels(text: str, pipe: Any) -> list[float]:
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
            "SDXL only, which predict noise. Write spacing=own or spacing=karras."
        )
    return list(AysSchedules[found])


def levels_of(steps: int, published: Sequence[float], smallest: float) -> np.ndarray:
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
