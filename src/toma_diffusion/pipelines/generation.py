"""Generates one image with a pipeline, the same on every machine, and writes images with their settings inside."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS_KEY = "toma"
"""The name of the text entry in a PNG that holds the settings."""

SEEDS = range(-(2**63), 2**64)
"""The seeds that torch accepts."""

CHECKS_OF_DIFFUSERS = ("check_inputs", "set_timesteps")
"""Functions in which diffusers checks the arguments of a pipeline, before the first step. A ValueError from one of them
is the user's mistake; any other is not."""


@dataclass(frozen=True)
class ImageRequest:
    """One image to generate. Fields that are None keep the pipeline's own default."""

    prompt: str
    seed: int = 0
    steps: int = 20
    guidance: float | None = None
    """Higher follows the prompt more closely."""
    width: int | None = None
    """In pixels, like `height`."""
    height: int | None = None
    negative_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps={self.steps} is not allowed: it must be 1 or more.")
        if self.seed not in SEEDS:
            raise UsageError(f"seed={self.seed} is not allowed: it must be from {SEEDS[0]} to {SEEDS[-1]}.")
        if (self.width is None) != (self.height is None):
            # Some pipelines of diffusers silently use their default size if one of the two is missing.
            raise UsageError(f"width={self.width}, height={self.height} is not allowed: give both, or neither.")


def generate_image(pipe: Any, request: ImageRequest, on_step: Callable[[int], None] | None = None) -> Image:
    """Generate one image. Its noise comes from the CPU, so that a seed gives the same image on every device.

    Args:
        pipe: a diffusers pipeline.
        request: prompt, seed and settings.
        on_step: called after every step with its number, counted from 0.

    Raises:
        UsageError: The pipeline does not take one of the settings, or refuses its value.
    """
    taken = inspect.signature(pipe.__call__).parameters
    arguments: dict[str, Any] = {"prompt": request.prompt, "num_inference_steps": request.steps}
    wanted = {
        "guidance_scale": request.guidance,
        "width": request.width,
        "height": request.height,
        "negative_prompt": request.negative_prompt,
    }
    for name, value in wanted.items():
        if value is None:
            continue
        if name not in taken:
            raise UsageError(f"{name}={value!r} cannot be given to a {type(pipe).__name__}: leave it out.")
        arguments[name] = value
    if on_step is not None:
        arguments |= _callback(taken, on_step)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(request.seed)  # ToMeSD and ToFu start from torch's own random state
        generator = torch.Generator("cpu").manual_seed(request.seed)
        try:
            image: Image = pipe(**arguments, generator=generator).images[0]
        except ValueError as error:
            if any(frame.name in CHECKS_OF_DIFFUSERS for frame in traceback.extract_tb(error.__traceback__)):
                raise UsageError(f"{type(pipe).__name__} does not accept these settings: {error}") from error
            raise
    return image


def write_png(image: Image, path: Path, settings: Mapping[str, Any]) -> None:
    """Write an image with its settings inside. The file is replaced as a whole: it is never seen half written."""
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_itxt(SETTINGS_KEY, json.dumps(settings, ensure_ascii=False))
    with replacing(path, "wb") as file:
        image.save(file, format="PNG", pnginfo=texts)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that `write_png` stored in a file."""
    from PIL import Image

    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(SETTINGS_KEY)
    if text is None:
        raise UsageError(f"{str(path)!r} holds no settings: it was not written by toma-diffusion.")
    settings: dict[str, Any] = json.loads(text)
    return settings


def _callback(taken: Mapping[str, Any], on_step: Callable[[int], None]) -> dict[str, Any]:
    """The callback as an argument of the pipeline. Newer pipelines pass themselves, and expect changed tensors back."""
    if "callback_on_step_end" in taken:

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step)
            return {}

        return {"callback_on_step_end": after_step}
    return {"callback": lambda step, timestep, latents: on_step(step)}
