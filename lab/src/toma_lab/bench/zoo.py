"""Denoisers to time: the published models of `models/`, with random weights, at real size or small; or loaded ones.

Speed does not depend on the weights, so nothing has to be downloaded to time a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.bench.inputs import FAMILIES, PIPELINES, Call, Family
from toma_lab.pipelines.checkpoints import DEMO_MODELS, DTYPES, can_be_opened, open_pipeline

SEED = 0
WEIGHT_SCALE = 0.02
"""Standard deviation of the random weights; activations then stay finite in half precision."""
SMALL_TEXT_TOKENS = 77
LARGE = 5_000_000_000
"""Parameters of a model whose steps take a tenth of a second or more on any GPU."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("models").glob("*.json"))
}
"""By name: the class in diffusers, the settings that differ from its defaults, the size, dtype and batch of a call (2
if the pipeline puts both halves of guidance into one), the rest of the pipeline, and changes that make it small."""


class Size(NamedTuple):
    """Of an image or a clip, in pixels."""

    width: int
    height: int
    frames: int | None = None


@dataclass(eq=False)
class Denoiser:
    """A model to time, and how to call it."""

    name: str
    """As in the rows."""
    model: nn.Module
    family: Family
    device: torch.device
    dtype: torch.dtype
    text_tokens: int
    default_batch: int
    default_size: Size
    pipeline: Any = None
    """The pipeline that the model was loaded with, if it was loaded."""
    _has_weights: bool = field(default=False, repr=False)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def is_large(self) -> bool:
        """Whether a GPU is busy with one call for so long that the CPU is always ahead of it."""
        return sum(parameter.numel() for parameter in self.model.parameters()) >= LARGE

    def frames_of(self, frames: int | None) -> int | None:
        """The frames of a clip: those that are asked for, or the model's default. None for image models."""
        groups = self.family.frame_groups
        if groups is None:
            if frames is not None:
                raise UsageError(
                    f"frames={frames} is for models of clips, and {self.name!r} makes images: leave it out."
                )
            return None
        chosen = self.default_size.frames if frames is None else frames
        groups.latents(chosen)  # raises if it cannot have that many
        return chosen

    def materialize(self) -> None:
        """Give the model its weights, on the device. Until then it takes no memory."""
        if self._has_weights:
            return
        if self.pipeline is None:
            fill(self.model, self.device, self.dtype)
        else:
            self.model.to(self.device)
        if self.device.type == "cuda" and "UNet" in type(self.model).__name__:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._has_weights = True

    def inputs(self, batch: int, width: int, height: int, frames: int | None = None) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(SEED)
        sizes = (batch, width, height, self.text_tokens, self.frames_of(frames))
        return self.family.inputs(Call(self.config, *sizes, self.device, self.dtype, generator))


def build(name: str, *, small: bool, device: torch.device, dtype: torch.dtype | None = None) -> Denoiser:
    """A model known by name, without weights as yet."""
    model = MODELS[name]
    family = FAMILIES[model["class"]]
    return Denoiser(
        name=f"{name}-small" if small else name,
        model=build_empty(model["class"], model["config"] | (model["small"]["config"] if small else {})),
        family=family,
        device=device,
        dtype=dtype or (torch.float32 if device.type == "cpu" else DTYPES[model["dtype"]]),
        text_tokens=min(SMALL_TEXT_TOKENS, family.text_tokens) if small else family.text_tokens,
        default_batch=model["batch"],
        default_size=Size(*(model["small"]["size"] if small else model["size"])),
    )


def load(source: str, *, device: torch.device, dtype: torch.dtype | None = None) -> Denoiser:
    """The denoiser of a checkpoint, from wherever `open_pipeline` finds it."""
    if not can_be_opened(source):
        raise UsageError(
            f"model {source!r} is not known: use one of {', '.join((*MODELS, *DEMO_MODELS))}, a folder with a "
            "diffusers pipeline, a .safetensors file, or an id of the hub such as owner/name."
        )
    pipeline: Any = open_pipeline(source, torch.float32 if dtype is None and device.type == "cpu" else dtype)
    model = find_denoisers(pipeline)[0].eval().requires_grad_(False)
    if type(model).__name__ not in FAMILIES:
        raise UsageError(
            f"model {source!r} has a denoiser of the class {type(model).__name__}, for which no inputs are known: "
            f"use one of {', '.join(FAMILIES)}."
        )
    family = PIPELINES.get(type(pipeline).__name__, FAMILIES[type(model).__name__])
    return Denoiser(
        name=Path(source).resolve().name if Path(source).exists() else source,
        model=model,
        family=family,
        device=device,
        dtype=pipeline.dtype,
        text_tokens=family.text_tokens,
        default_batch=2 if family.is_guided else 1,
        default_size=_usual_size(pipeline, model, family),
        pipeline=pipeline,
    )


def _usual_size(pipeline: Any, model: Any, family: Family) -> Size:
    """Of clips the defaults of the pipeline's call, or what most have; of images what the model was trained with."""
    if family.frame_groups is None:
        side: Any = getattr(model.config, "sample_size", None)
        side = side * 8 if isinstance(side, int) else 1024
        return Size(side, side)
    taken = signature(pipeline.__call__).parameters
    usual = (("width", 832), ("height", 480), ("num_frames", 121))
    return Size(*(getattr(taken.get(name), "default", None) or other for name, other in usual))


def build_empty(class_name: str, config: Mapping[str, Any]) -> nn.Module:
    """A diffusers model whose weights take no memory as yet."""
    import diffusers

    if not hasattr(diffusers, class_name):
        raise UsageError(
            f"diffusers {diffusers.__version__} has no {class_name}: install a newer one (pip install -U diffusers)."
        )
    return empty(lambda: getattr(diffusers, class_name).from_config(dict(config)))


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, with its weights on the `meta` device. Its tables are computed all the same."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = make()
    return model.eval().requires_grad_(False)


def fill(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the weights of a model on the `meta` device, and fill them with the same random numbers every time.

    Modules that diffusers keeps in float32 when it loads a checkpoint are so here.
    """
    in_float32: set[str] = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    generator = torch.Generator(device).manual_seed(SEED)

    def place(tensor: Tensor, wanted: torch.dtype) -> Tensor:
        wanted = wanted if tensor.is_floating_point() else tensor.dtype
        return torch.zeros_like(tensor, device=device, dtype=wanted) if tensor.is_meta else tensor.to(device, wanted)

    for name, module in model.named_modules():
        wanted = dtype if in_float32.isdisjoint(name.split(".")) else torch.float32
        module._apply(lambda tensor, wanted=wanted: place(tensor, wanted), recurse=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, WEIGHT_SCALE, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
                parameter.add_(1)
