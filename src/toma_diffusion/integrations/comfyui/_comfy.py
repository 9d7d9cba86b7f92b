"""What is used of ComfyUI. It is imported in functions only: without it this package can be read and tested."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.errors import UsageError

KEY = "toma_diffusion"
"""Under which our wrapper is kept in a ModelPatcher."""
COMPILED = "torch.compile"
"""Under which ComfyUI keeps the wrapper of its node TorchCompileModel."""


def denoiser_of(patcher: Any) -> nn.Module:
    """The model inside a ModelPatcher, as this clone has it."""
    model: nn.Module = patcher.get_model_object("diffusion_model")
    return model


def is_compiled(patcher: Any) -> bool:
    """Whether nodes have this clone compiled with `torch.compile`."""
    wrappers = getattr(patcher, "wrappers", {})
    by_wrapper = any(COMPILED in each for each in wrappers.values())
    return by_wrapper or hasattr(denoiser_of(patcher), "_orig_mod")


def wrap_sampling(patcher: Any, wrapper: Any) -> None:
    """Call `wrapper` around every sampling with this clone, in the place of an earlier one of ours."""
    if not hasattr(patcher, "add_wrapper_with_key"):
        raise UsageError("this version of ComfyUI has no wrappers of sampling: update it to 0.3.10 or newer.")
    place = _outer_sample()
    patcher.remove_wrappers_with_key(place, KEY)
    patcher.add_wrapper_with_key(place, KEY, wrapper)


def wrapper_of(patcher: Any) -> Any:
    """Our wrapper of a clone, or None."""
    found = getattr(patcher, "wrappers", {}).get(_outer_sample(), {}).get(KEY, [])
    return found[0] if found else None


def wrapper_in(options: Any) -> Any:
    """Our wrapper of the clone that makes a call, from its `transformer_options`; None if that clone has none."""
    found = options.get("wrappers", {}).get(_outer_sample(), {}).get(KEY, [])
    return found[0] if found else None


def _outer_sample() -> str:
    from comfy.patcher_extension import WrappersMP

    name: str = WrappersMP.OUTER_SAMPLE
    return name
