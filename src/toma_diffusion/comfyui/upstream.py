"""What is used of ComfyUI. It is imported in functions only: without it this package can be read and tested."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from toma_diffusion.errors import UsageError

KEY = "toma_diffusion"
"""Under which our wrappers are kept in a ModelPatcher."""
COMPILED = "torch.compile"
"""Under which ComfyUI keeps the wrapper of its node TorchCompileModel."""
CACHES = {"easycache": "EasyCache", "lazycache": "LazyCache"}
"""Under which ComfyUI keeps the wrappers of its nodes that skip steps themselves, and what they are called."""


def denoiser_of(patcher: Any) -> nn.Module:
    """The model inside a ModelPatcher, as this clone has it."""
    model: nn.Module = patcher.get_model_object("diffusion_model")
    return model


def is_compiled(patcher: Any) -> bool:
    """Whether nodes have this clone compiled with `torch.compile`: the whole model, or single blocks of it."""
    replaced = [denoiser_of(patcher), *patcher.object_patches.values()]
    return COMPILED in _wrapper_keys(patcher) or any(hasattr(each, "_orig_mod") for each in replaced)


def cache_of(patcher: Any) -> str | None:
    """The node that has this clone skip steps already, if there is one."""
    keys = _wrapper_keys(patcher)
    return next((name for key, name in CACHES.items() if key in keys), None)


def wrap_sampling(patcher: Any, sampling: Any, evaluation: Any) -> None:
    """Call these around every sampling with this clone, and around every evaluation by its sampler, in the place of
    earlier ones of ours."""
    for name, wrapper in (("OUTER_SAMPLE", sampling), ("PREDICT_NOISE", evaluation)):
        place = _place(name)
        patcher.remove_wrappers_with_key(place, KEY)
        patcher.add_wrapper_with_key(place, KEY, wrapper)


def wrapper_of(patcher: Any) -> Any:
    return wrapper_in(getattr(patcher, "wrappers", None))


def wrapper_in(wrappers: Any) -> Any:
    """The same among the wrappers of a clone, which calls of the model have in their `transformer_options`."""
    found = (wrappers or {}).get(_place("OUTER_SAMPLE"), {}).get(KEY, [])
    return found[0] if found else None


def sampler_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The sampler among the arguments of `CFGGuider.outer_sample`, as ComfyUI's nodes list it; of samplers that it does
    not have the name of the function or class."""
    sampler = args[2] if len(args) > 2 else kwargs.get("sampler")
    function = getattr(sampler, "sampler_function", None)
    function = getattr(function, "func", function)  # of a partial function
    name = str(getattr(function, "__name__", type(sampler).__name__))
    return name.removeprefix("sample_").removesuffix("_function")


def show(text: str, node_id: str | None) -> None:
    """Show a text on a node, if ComfyUI's server is running and can."""
    server: Any = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if node_id is not None and hasattr(server, "send_progress_text"):
        server.send_progress_text(text, node_id)


def _wrapper_keys(patcher: Any) -> set[str]:
    return {key for each in getattr(patcher, "wrappers", {}).values() for key, found in each.items() if found}


def _place(name: str) -> str:
    """Where a wrapper is put, by the name that ComfyUI has for it."""
    try:
        from comfy.patcher_extension import WrappersMP

        place: str = getattr(WrappersMP, name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"this version of ComfyUI has no wrappers of sampling, which ToMA needs ({error}): update ComfyUI."
        ) from error
    return place
