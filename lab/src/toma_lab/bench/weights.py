"""Models without weights, at no cost of memory, and random weights for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from toma_diffusion.errors import UsageError

SEED = 0
WEIGHT_SCALE = 0.02
"""Standard deviation of the random weights; activations then stay finite in half precision."""
FOR_WEIGHTS = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""What weights are made with. Tables of positions and times are computed from `torch.arange`."""


class EmptyWeights(TorchFunctionMode):
    """Inside, models are built on the `meta` device, but their tables are computed.

    Unlike under `torch.device("meta")`, where tables would be lost: those that are plain attributes of a module even
    stay on `meta` when it gets its weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in FOR_WEIGHTS and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_empty(class_name: str, config: Mapping[str, Any]) -> nn.Module:
    """A diffusers model on the `meta` device: its structure and its tables, without memory for the weights."""
    import diffusers

    if not hasattr(diffusers, class_name):
        raise UsageError(
            f"diffusers {diffusers.__version__} has no {class_name}: install a newer one (pip install -U diffusers)."
        )
    return empty(lambda: getattr(diffusers, class_name)(**config))


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that `make` returns, ready to be called once it is filled."""
    with EmptyWeights():
        model = make()
    return model.eval().requires_grad_(False)


def fill(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Allocate the weights of a model on the `meta` device, and fill them with the same random numbers every time.

    Modules that diffusers keeps in float32 when it loads a checkpoint are so here.
    """
    in_float32: set[str] = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, module in model.named_modules():
        wanted = dtype if in_float32.isdisjoint(name.split(".")) else torch.float32
        module._apply(_placed(device, wanted), recurse=False)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, WEIGHT_SCALE, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # of a norm
                parameter.add_(1)


def _placed(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def place(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.is_meta:
            return torch.zeros(tensor.shape, device=device, dtype=wanted)
        return tensor.to(device, wanted)

    return place
