"""Opening a pipeline and drawing one image with it, the same on every machine; images that carry their settings."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toma_diffusion.api import DENOISERS
from toma_diffusion.bench.inputs import FAMILIES
from toma_diffusion.bench.models import DTYPES, HUB_ID

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

BUNDLED = "bundled"
SETTINGS_KEY = "toma"
"""The name of the text in a PNG that holds the settings."""
SINGLE_FILES: Mapping[str, str] = {
    "double_blocks.": "FluxPipeline",
    "joint_blocks.": "StableDiffusion3Pipeline",
    "conditioner.embedders.1.": "StableDiffusionXLPipeline",
    "model.diffusion_model.input_blocks.": "StableDiffusionPipeline",
}
"""What a checkpoint in a single file has in the names of its weights, and the pipeline it is for. The first that fits
counts: SDXL has the names of Stable Diffusion 1.5 too."""


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


def bundled_model() -> Path:
    """The folder of the small model that comes with the package."""
    folder = Path(__file__).with_name("bundled")
    if not (folder / "model_index.json").exists():
        raise FileNotFoundError(
            "the bundled model is not in this installation: install the package from a release or a whole checkout, "
            "or give another model, a folder or an id of the hub."
        )
    return folder


def load_pipeline(model: str, device: str | None = None, dtype: str | None = None) -> DiffusionPipeline:
    """A pipeline, ready to draw, without a progress bar of its own.

    Args:
        model: `bundled`, a folder with a diffusers pipeline, a checkpoint in a single `.safetensors` file, or an id of
            the hub.
        device: such as `cpu`, `cuda`, `cuda:1`; a GPU if there is one.
        dtype: `float16`, `bfloat16` or `float32`; what the model is usually run in on a GPU, `float32` on a CPU.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    chosen = torch.float32 if torch.device(where).type == "cpu" else None
    chosen = DTYPES[dtype] if dtype is not None else chosen
    source = str(bundled_model()) if model == BUNDLED else model
    with warnings.catch_warnings():
        # Newer versions of diffusers call it `dtype`, older ones do not know that name.
        warnings.filterwarnings("ignore", ".*torch_dtype", FutureWarning)
        pipe = _load_file(Path(source), chosen) if Path(source).is_file() else _load_folder(source, chosen)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(where)


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            image.save(file, format="PNG", pnginfo=texts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that `write_png` put into a file."""
    from PIL import Image

    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(SETTINGS_KEY)
    if text is None:
        raise ValueError(f"{str(path)!r} holds no settings: it was not written by this package.")
    settings: dict[str, Any] = json.loads(text)
    return settings


def _load_folder(source: str, dtype: torch.dtype | None) -> Any:
    from diffusers import DiffusionPipeline

    if not Path(source).exists() and not re.fullmatch(HUB_ID, source):
        raise ValueError(
            f"model {source!r} is not known: use {BUNDLED!r}, a folder with a diffusers pipeline, a .safetensors file, "
            "or an id of the hub such as owner/name."
        )
    try:
        parts: Mapping[str, Any] = DiffusionPipeline.load_config(source)
        classes = [parts[name][1] for name in DENOISERS if name in parts]
        return DiffusionPipeline.from_pretrained(source, torch_dtype=dtype or _half(classes))
    except Exception as error:  # whatever diffusers and the hub raise: not found, no network, not a pipeline
        raise ValueError(f"model {source!r}: no diffusers pipeline could be loaded from there: {error}") from error


def _load_file(path: Path, dtype: torch.dtype | None) -> Any:
    import diffusers
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"model {str(path)!r} is not a .safetensors file ({error}).") from error
    name = next((name for mark, name in SINGLE_FILES.items() if any(mark in weight for weight in weights)), None)
    if name is None:
        raise ValueError(
            f"model {str(path)!r} is no whole model that is known from a single file: "
            f"it must be one for {', '.join(SINGLE_FILES.values())}."
        )
    half = torch.bfloat16 if name in ("FluxPipeline", "StableDiffusion3Pipeline") else torch.float16
    try:
        return getattr(diffusers, name).from_single_file(str(path), torch_dtype=dtype or half)
    except Exception as error:  # whatever diffusers and the hub raise
        raise ValueError(
            f"model {str(path)!r}: the {name} in it could not be loaded. Such a file holds the weights alone, and the "
            f"settings come from the hub: {error}"
        ) from error


def _half(class_names: list[str]) -> torch.dtype:
    """The precision in which a denoiser is run on a GPU."""
    return next((FAMILIES[name].half for name in class_names if name in FAMILIES), torch.float16)


def _callback(taken: Mapping[str, Any], on_step: Callable[[int], None]) -> dict[str, Any]:
    """As the pipeline wants it: the newer ones pass themselves, and take back what the callback changed."""
    if "callback_on_step_end" in taken:

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step)
            return {}

        return {"callback_on_step_end": after_step}
    return {"callback": lambda step, timestep, latents: on_step(step)}
