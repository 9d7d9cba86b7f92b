"""Opening a pipeline: the bundled one, a folder's, a single file's, or the hub's."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toma_diffusion.api import DENOISERS

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

BUNDLED = "bundled"
HUB_ID = r"[\w.-]+/[\w.-]+"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
IN_BFLOAT16 = ("FluxTransformer2DModel", "SD3Transformer2DModel", "FluxPipeline", "StableDiffusion3Pipeline")
"""Denoisers, and pipelines of them, that are run in bfloat16; the others are in float16."""
HASHED_NUMBERS = 64
"""Of every weight, about."""
SINGLE_FILES: Mapping[str, str] = {
    "double_blocks.": "FluxPipeline",
    "joint_blocks.": "StableDiffusion3Pipeline",
    "conditioner.embedders.1.": "StableDiffusionXLPipeline",
    "model.diffusion_model.input_blocks.": "StableDiffusionPipeline",
}
"""What a checkpoint in a single file has in the names of its weights, and the pipeline it is for. The first that fits
counts: SDXL has the names of Stable Diffusion 1.5 too."""


def bundled_model() -> Path:
    """The folder of the small model that comes with the package."""
    folder = Path(__file__).with_name("bundled")
    if not (folder / "model_index.json").exists():
        raise FileNotFoundError(
            "the bundled model is not in this installation: its files were left out or deleted. Install the package "
            "again, or give another model, a folder or an id of the hub."
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
    return open_pipeline(model, DTYPES[dtype] if dtype is not None else chosen).to(where)


def open_pipeline(model: str, dtype: torch.dtype | None = None) -> DiffusionPipeline:
    """The same, wherever its weights come to lie; without a `dtype`, in the half precision that is usual for it."""
    source = str(bundled_model()) if model == BUNDLED else model
    with _quietly():
        pipe = _load_file(Path(source), dtype) if Path(source).is_file() else _load_folder(source, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def can_be_opened(model: str) -> bool:
    """Whether that may be a model: it is there, or it has the form of an id of the hub."""
    return model == BUNDLED or Path(model).exists() or re.fullmatch(HUB_ID, model) is not None


def public_name(model: str) -> str:
    """What to call a model in files that others may read: not where it lies on this machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def fingerprint(pipe: Any) -> str:
    """Tells a pipeline from another with other weights: a hash of some numbers of every weight. To hash all numbers of
    a large model would take a minute."""
    digest = hashlib.sha256()
    for part, module in sorted(pipe.components.items()):
        if isinstance(module, nn.Module):
            for name, tensor in sorted(module.state_dict().items()):
                numbers = tensor.detach().flatten()
                some = numbers[:: max(1, len(numbers) // HASHED_NUMBERS)].float().cpu()
                digest.update(f"{part}.{name} {tuple(tensor.shape)}".encode())
                digest.update(some.numpy().tobytes())
    return digest.hexdigest()[:12]


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the bars and remarks of diffusers and transformers while they load; errors are still raised."""
    from diffusers.utils import logging as of_diffusers

    talkers: list[Any] = [of_diffusers]
    if importlib.util.find_spec("transformers"):
        from transformers.utils import logging as of_transformers

        talkers.append(of_transformers)
    before = [(each.get_verbosity(), each.is_progress_bar_enabled()) for each in talkers]
    for each in talkers:
        each.set_verbosity_error()
        each.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # Newer versions of diffusers call it `dtype`, older ones do not know that name.
            warnings.filterwarnings("ignore", ".*torch_dtype", FutureWarning)
            yield
    finally:
        for each, (verbosity, had_bars) in zip(talkers, before, strict=True):
            each.set_verbosity(verbosity)
            if had_bars:
                each.enable_progress_bar()


def _load_folder(source: str, dtype: torch.dtype | None) -> Any:
    from diffusers import DiffusionPipeline

    if not can_be_opened(source):
        raise ValueError(
            f"model {source!r} is not known: use {BUNDLED!r}, a folder with a diffusers pipeline, a .safetensors file, "
            "or an id of the hub such as owner/name."
        )
    try:
        parts: Mapping[str, Any] = DiffusionPipeline.load_config(source)
        classes = [parts[name][1] for name in DENOISERS if name in parts] or [""]
        return DiffusionPipeline.from_pretrained(source, torch_dtype=dtype or half_precision(classes[0]))
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
    try:
        return getattr(diffusers, name).from_single_file(str(path), torch_dtype=dtype or half_precision(name))
    except Exception as error:  # whatever diffusers and the hub raise
        raise ValueError(
            f"model {str(path)!r}: the {name} in it could not be loaded. Such a file holds the weights alone, and the "
            f"settings come from the hub: {error}"
        ) from error


def half_precision(class_name: str) -> torch.dtype:
    """The precision in which a denoiser, or a pipeline, of that class is run on a GPU."""
    return torch.bfloat16 if class_name in IN_BFLOAT16 else torch.float16
