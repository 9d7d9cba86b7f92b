"""Opens a pipeline: a demo model, a folder, a single file, or a model of the hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toma_diffusion.engine.clock import DENOISERS
from toma_diffusion.errors import UsageError
from toma_lab.pipelines.generation import check_guidance

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

BUNDLED, FOUR_STEP, FLUX, VIDEO = "bundled", "bundled-4step", "bundled-flux", "bundled-video"
"""The demo models: the first, the same for four steps without guidance, a Flux-class transformer, and a Wan-class one,
which makes clips. They have a package of their own, toma-diffusion-demo."""
DEMO_MODELS_OF_IMAGES = (BUNDLED, FOUR_STEP, FLUX)
DEMO_MODELS = (*DEMO_MODELS_OF_IMAGES, VIDEO)
DEMO_LOADERS: Mapping[str, str] = {FOUR_STEP: "four_step_pipeline", FLUX: "flux_pipeline", VIDEO: "wan_pipeline"}
"""The functions in `toma_diffusion_demo.loading` that load what diffusers cannot load alone."""
DEMO_PIPELINES: Mapping[str, str] = {"DemoWanPipeline": "wan_pipeline"}
"""Pipelines of folders that the project's training writes, and the functions that load them: diffusers cannot."""
MADE_FOR: Mapping[str, tuple[int, float]] = {FOUR_STEP: (4, 1.0)}
"""Models made for one number of steps and one guidance scale. At other ones they are worse."""
INSTALL_DEMO = "pip install 'toma-diffusion-lab[demo]' (from a checkout: pip install ./demo-model)"
HUB_ID = r"[\w.-]+/[\w.-]+"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
IN_FLOAT16 = ("UNet", "PixArt", "AuraFlow", "StableDiffusionPipeline", "StableDiffusionXLPipeline")
"""In the names of denoisers, and of pipelines of single files, that run in float16. All others run in bfloat16."""
HASHED_NUMBERS = 64
"""How many numbers of each weight go into the fingerprint, about."""
SINGLE_FILES: Mapping[str, str] = {
    "distilled_guidance_layer.": "ChromaPipeline",
    "single_stream_modulation.": "Flux2Pipeline",
    "double_blocks.": "FluxPipeline",
    "joint_blocks.": "StableDiffusion3Pipeline",
    "layers.0.adaLN_modulation.0.": "ZImagePipeline",
    "conditioner.embedders.1.": "StableDiffusionXLPipeline",
    "model.diffusion_model.input_blocks.": "StableDiffusionPipeline",
}
"""Part of a weight's name in a single-file checkpoint, and the pipeline it belongs to. The first match counts: SDXL has
the names of Stable Diffusion 1.5 too, Chroma and FLUX.2 those of Flux.1."""


def bundled_model() -> Path:
    """The folder of the demo model. Raises `UsageError` if its package is not installed."""
    try:
        from toma_diffusion_demo import model_folder
    except ModuleNotFoundError as error:
        raise UsageError(f"model {BUNDLED!r} is not installed. Install it: {INSTALL_DEMO}.") from error
    return model_folder()


def load_pipeline(model: str, device: str | None = None, dtype: str | None = None) -> DiffusionPipeline:
    """Open a pipeline on a device, with its own progress bar switched off.

    Args:
        model: `bundled`, `bundled-4step`, `bundled-flux`, `bundled-video`, a folder with a diffusers pipeline, a
            single-file `.safetensors` checkpoint, or a hub id.
        device: such as `cpu`, `cuda` or `cuda:1`. Defaults to a GPU if there is one.
        dtype: `float16`, `bfloat16` or `float32`. Defaults to the usual half precision of the model on a GPU, and to
            `float32` on a CPU.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}.")
    chosen = torch.float32 if torch.device(where).type == "cpu" else None
    return open_pipeline(model, DTYPES[dtype] if dtype is not None else chosen).to(where)


def open_pipeline(model: str, dtype: torch.dtype | None = None) -> DiffusionPipeline:
    """Open a pipeline without moving it to a device. `dtype` defaults to the usual half precision of the model."""
    source = str(bundled_model()) if model == BUNDLED else model
    with _loading_messages_off():
        if model in DEMO_LOADERS:
            pipe = _load_demo(DEMO_LOADERS[model], {}, dtype)
        else:
            pipe = _load_file(Path(source), dtype) if Path(source).is_file() else _load_folder(source, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def can_be_opened(model: str) -> bool:
    """Whether this may be a model: a demo model, a file or folder that exists, or a name in the form of a hub id."""
    return model in DEMO_MODELS or Path(model).exists() or re.fullmatch(HUB_ID, model) is not None


def public_name(model: str) -> str:
    """The name of a model for files that others may read: without its path on this machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def steps_and_guidance(
    model: str, steps: int | None, guidance: float | None, usual_steps: int
) -> tuple[int, float | None]:
    """What to generate with: what the user says (not None), else what the model is made for, else `usual_steps` and the
    guidance of the pipeline."""
    check_guidance(guidance)
    own_steps, own_guidance = MADE_FOR.get(model, (usual_steps, None))
    return own_steps if steps is None else steps, own_guidance if guidance is None else guidance


def fingerprint(pipe: Any) -> str:
    """A hash of some numbers of every weight: pipelines with different weights have different ones. Hashing all numbers
    of a large model would take a minute."""
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
def _loading_messages_off() -> Iterator[None]:
    """Switch the progress bars and log messages of diffusers and transformers off. Errors are still raised."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    loggers: list[Any] = [diffusers_logging, transformers_logging]
    before = [(each.get_verbosity(), each.is_progress_bar_enabled()) for each in loggers]
    for each in loggers:
        each.set_verbosity_error()
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each, (verbosity, had_bars) in zip(loggers, before, strict=True):
            each.set_verbosity(verbosity)
            if had_bars:
                each.enable_progress_bar()


def _precision(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument of diffusers, by the name that this version wants."""
    import diffusers
    from packaging.version import Version

    return {"dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype": dtype}


def _load_demo(loader: str, arguments: Mapping[str, Any], dtype: torch.dtype | None) -> Any:
    bundled_model()  # raises if there is no demo package
    from toma_diffusion_demo import loading

    return getattr(loading, loader)(**arguments, **({} if dtype is None else {"dtype": dtype}))


def _load_folder(source: str, dtype: torch.dtype | None) -> Any:
    from diffusers import DiffusionPipeline

    if not can_be_opened(source):
        raise UsageError(
            f"model {source!r} is not known: use one of {', '.join(DEMO_MODELS)}, a folder with a diffusers pipeline, "
            "a .safetensors file, or a hub id such as owner/name."
        )
    try:
        parts: Mapping[str, Any] = DiffusionPipeline.load_config(source)
        if parts["_class_name"] in DEMO_PIPELINES:
            return _load_demo(DEMO_PIPELINES[parts["_class_name"]], {"folder": Path(source)}, dtype)
        classes = [parts[name][1] for name in DENOISERS if name in parts] or [""]
        return DiffusionPipeline.from_pretrained(source, **_precision(dtype or half_precision(classes[0])))
    except UsageError:
        raise
    except Exception as error:  # diffusers and the hub raise many kinds: not found, no network, not a pipeline
        raise UsageError(f"model {source!r} could not be loaded as a diffusers pipeline: {error}") from error


def _load_file(path: Path, dtype: torch.dtype | None) -> Any:
    import diffusers
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise UsageError(f"model {str(path)!r} cannot be read as a .safetensors file: {error}") from error
    name = next((name for mark, name in SINGLE_FILES.items() if any(mark in weight for weight in weights)), None)
    if name is None:
        raise UsageError(
            f"model {str(path)!r} is not a complete model of a known kind. "
            f"A single file must hold one of {', '.join(SINGLE_FILES.values())}."
        )
    load = getattr(getattr(diffusers, name, None), "from_single_file", None)
    if load is None:
        raise UsageError(
            f"model {str(path)!r} holds a {name}, which diffusers {diffusers.__version__} cannot open from a single "
            "file: give the folder of its pipeline, or a hub id."
        )
    try:
        return load(str(path), **_precision(dtype or half_precision(name)))
    except Exception as error:  # as above
        raise UsageError(
            f"model {str(path)!r}: the {name} in it could not be loaded. A single file holds weights only, its "
            f"configuration is read from the hub: {error}"
        ) from error


def half_precision(class_name: str) -> torch.dtype:
    """The usual half precision of a denoiser or pipeline of this class."""
    return torch.float16 if any(name in class_name for name in IN_FLOAT16) else torch.bfloat16
