"""Drawing one image with a pipeline, the same on every machine; images that carry their settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toma_diffusion.files import replacing

if TYPE_CHECKING:
    from PIL.Image import Image

SETTINGS_KEY = "toma"
"""The name of the text in a PNG that holds the settings."""

SEEDS = range(-(2**63), 2**64)
"""What torch takes."""


@dataclass(frozen=True)
class Drawing:
    """One image to draw. What is None is left to the pipeline."""

    prompt: str
    seed: int = 0
    steps: int = 20
    guidance: float | None = None
    """Higher follows the prompt more closely."""
    width: int | None = None
    """In pixels, as `height`."""
    height: int | None = None
    negative_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} is not allowed: it must be 1 or more.")
        if self.seed not in SEEDS:
            raise ValueError(f"seed={self.seed} is not allowed: it must be from {SEEDS[0]} to {SEEDS[-1]}.")
        if (self.width is None) != (self.height is None):
            # Some pipelines of diffusers take their own size if one of the two is missing, without a word.
            raise ValueError(f"width={self.width}, height={self.height} is not allowed: give both, or neither.")


def draw(pipe: Any, drawing: Drawing, on_step: Callable[[int], None] | None = None) -> Image:
    """Draw one image. Its noise comes from the CPU, so that a seed means the same image on every device.

    Args:
        on_step: called with the step's number, from 0, after every step.
    """
    taken = inspect.signature(pipe.__call__).parameters
    arguments: dict[str, Any] = {"prompt": drawing.prompt, "num_inference_steps": drawing.steps}
    wanted = {
        "guidance_scale": drawing.guidance,
        "width": drawing.width,
        "height": drawing.height,
        "negative_prompt": drawing.negative_prompt,
    }
    for name, value in wanted.items():
        if value is None:
            continue
        if name not in taken:
            raise ValueError(f"{name}={value!r} cannot be given to a {type(pipe).__name__}: leave it out.")
        arguments[name] = value
    if on_step is not None:
        arguments |= _callback(taken, on_step)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(drawing.seed)  # ToMeSD and ToFu start from torch's own random state
        image: Image = pipe(**arguments, generator=torch.Generator("cpu").manual_seed(drawing.seed)).images[0]
    return image


def write_png(image: Image, path: Path, settings: Mapping[str, Any]) -> None:
    """Write an image with its settings inside. Nobody ever sees the file half written."""
    from PIL.PngImagePlugin import PngInfo

    texts = PngInfo()
    texts.add_itxt(SETTINGS_KEY, json.dumps(settings, ensure_ascii=False))
    with replacing(path, "wb") as file:
        image.save(file, format="PNG", pnginfo=texts)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that `write_png` put into a file."""
    from PIL import Image

    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(SETTINGS_KEY)
    if text is None:
        raise ValueError(f"{str(path)!r} holds no settings: it was not written by this package.")
    settings: dict[str, Any] = json.loads(text)
    return settings


def _callback(taken: Mapping[str, Any], on_step: Callable[[int], None]) -> dict[str, Any]:
    """As the pipeline wants it: the newer ones pass themselves, and take back what the callback changed."""
    if "callback_on_step_end" in taken:

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step)
            return {}

        return {"callback_on_step_end": after_step}
    return {"callback": lambda step, timestep, latents: on_step(step)}
