"""What the package uses of diffusers, accelerate and torch beyond their public names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def unwrap_compiled(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_instance(model: nn.Module, class_name: str) -> bool:
    """Whether `model` is of this diffusers class. diffusers is imported only here, because that takes seconds."""
    import diffusers

    model_class: Any = getattr(diffusers, class_name, None)
    return model_class is not None and isinstance(model, model_class)


def feed_forward_chunk_dim(block: nn.Module) -> int | None:
    """The dimension along which `set_chunk_feed_forward` splits the input of the feed-forward layer, if it does."""
    return getattr(block, "_chunk_dim", 0) if getattr(block, "_chunk_size", None) is not None else None


@contextmanager
def weights_loaded(module: nn.Module) -> Iterator[None]:
    """Load the weights of a block to its device for the duration of a `with` block, if they are offloaded.

    Offloading loads weights inside the block's `forward`. What is computed before it would find them on another device,
    on disk or empty.
    """
    registry: Any = getattr(module, "_diffusers_hook", None)
    group_offload = registry.get_hook("group_offloading") if registry is not None else None
    hooks: list[Any] = [hook for hook in (group_offload, getattr(module, "_hf_hook", None)) if hook is not None]
    for hook in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook in reversed(hooks):
            hook.post_forward(module, None)


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights are loaded to the device while the model runs."""
    for module in model.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        if registry is not None and registry.get_hook("group_offloading") is not None:
            return True
        if module is not model and getattr(module, "_hf_hook", None) is not None:
            return True
    return False


def devices_of_map(model: nn.Module) -> list[str]:
    """The devices that a `device_map` has spread the model over. Weights on `cpu` and `disk` are only stored there."""
    placed: Any = getattr(model, "hf_device_map", None) or {}
    return sorted({str(device) for device in placed.values()} - {"cpu", "disk"})


def recomputes(model: nn.Module) -> bool:
    """Whether gradient checkpointing runs blocks a second time in the backward pass."""
    return bool(getattr(model, "is_gradient_checkpointing", False))


def has_fused_projections(attention: nn.Module) -> bool:
    """Whether queries, keys and values are one projection. (The module's own flag stays set after unfusing.)"""
    return type(getattr(attention, "processor", None)).__name__.startswith("Fused")


def has_block_cache(model: nn.Module) -> bool:
    """Whether a cache such as FirstBlockCache compares and reuses the outputs of whole blocks."""
    return bool(getattr(model, "is_cache_enabled", False))


def has_compiled_anything() -> bool:
    """Whether torch.compile has compiled any code in this process."""
    from torch._dynamo import convert_frame

    return bool(convert_frame.output_codes.seen)
