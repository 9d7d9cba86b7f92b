"""Generates images with a pipeline, the same on every machine, and writes them with their settings inside."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        check_guidance(self.guidance)


def check_guidance(guidance: float | None) -> None:
    """Raise `UsageError` if it is not a number: pipelines then generate black pictures without a word."""
    if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
        raise UsageError(f"guidance={guidance} is not allowed: it must be 0 or more.")


def generate_image(pipe: Any, request: ImageRequest, on_step: Callable[[int], None] | None = None) -> Image:
    """Generate one image. Its noise comes from the CPU, so that a seed gives the same image on every device.

    Args:
        pipe: a diffusers pipeline.
        request: prompt, seed and settings.
        on_step: called after every step with its number, counted from 0.

    Raises:
        UsageError: The pipeline does not take one of the settings, or refuses its value.
    """
    image: Image = call(pipe, [request], on_step).images[0]
    return image


def makes_clips(pipe: Any) -> bool:
    """Whether a pipeline generates clips: its call then takes the number of frames."""
    return "num_frames" in inspect.signature(pipe.__call__).parameters


def call(pipe: Any, requests: Sequence[ImageRequest], on_step: Callable[[int], None] | None, **more: Any) -> Any:
    """Call the pipeline once, with `more` arguments as they are, and return its output."""
    first = requests[0]
    if makes_clips(pipe) and type(first) is ImageRequest:
        raise UsageError(f"a {type(pipe).__name__} generates clips, not images: use a pipeline of images here.")
    for request in requests:
        if replace(request, prompt=first.prompt, seed=first.seed) != first:
            raise UsageError(f"{request} has other settings than {first}: generate them in calls of their own.")
    generators = [torch.Generator("cpu").manual_seed(request.seed) for request in requests]
    arguments = _arguments(pipe, requests) | more
    arguments["generator"] = generators if len(generators) > 1 else generators[0]
    if on_step is not None:
        arguments |= _callback(inspect.signature(pipe.__call__).parameters, on_step)
    untouched = [generator.get_state() for generator in generators]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(first.seed)  # ToMeSD and ToFu start from torch's own random state
        try:
            return pipe(**arguments)
        except ValueError as error:
            # Pipelines check their arguments before they draw the noise. Later errors are no mistakes of the user.
            has_begun = not all(map(torch.equal, untouched, [generator.get_state() for generator in generators]))
            if has_begun or isinstance(error, UsageError):
                raise
            raise UsageError(f"{type(pipe).__name__} does not accept these settings: {error}") from error


def _arguments(pipe: Any, requests: Sequence[ImageRequest]) -> dict[str, Any]:
    """What the pipeline is called with. For one image these are plain values, which every pipeline takes."""
    first, taken = requests[0], inspect.signature(pipe.__call__).parameters
    of_each: dict[str, list[str]] = {"prompt": [request.prompt for request in requests]}
    scale, negative = "guidance_scale", first.negative_prompt
    if _is_guided_by_two_passes(pipe):
        scale = "true_cfg_scale"
        guidance = taken[scale].default if first.guidance is None else first.guidance
        if guidance > 1 and negative is None:
            negative = ""  # without a negative prompt there is no second pass
    if negative is not None:
        of_each["negative_prompt"] = [negative] * len(requests)
    arguments: dict[str, Any] = {key: each if len(requests) > 1 else each[0] for key, each in of_each.items()}
    arguments |= {"num_inference_steps": first.steps}
    arguments |= {scale: first.guidance, "width": first.width, "height": first.height}
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in given.items():
        if name not in taken:
            raise UsageError(f"{name}={value!r} cannot be given to a {type(pipe).__name__}: leave it out.")
    return given


def _is_guided_by_two_passes(pipe: Any) -> bool:
    """Whether it is a Flux or Qwen-Image that takes no guidance as input, so that `guidance_scale` would do nothing."""
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    taken = inspect.signature(pipe.__call__).parameters
    takes_input = "guidance_scale" in taken and config.get("guidance_embeds", True)
    return "true_cfg_scale" in taken and not takes_input


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
    """The callback as an argument of the pipeline. Newer pipelines pass themselves, and expect changed tensors back. A
    few take none."""
    if "callback_on_step_end" in taken:

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step)
            return {}

        return {"callback_on_step_end": after_step}
    return {"callback": lambda step, timestep, latents: on_step(step)} if "callback" in taken else {}
