"""The only file that touches private names of diffusers and of torch's module wrappers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

Compute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(module)`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_instance(model: nn.Module, class_name: str) -> bool:
    """Whether `model` is of a diffusers class, which is looked up only now: importing diffusers takes seconds."""
    import diffusers

    model_class: Any = getattr(diffusers, class_name, None)
    return model_class is not None and isinstance(model, model_class)


def feed_forward_chunk_dim(block: nn.Module) -> int | None:
    """The dimension along which `set_chunk_feed_forward` feeds the feed-forward layer in pieces, if it does."""
    return getattr(block, "_chunk_dim", 0) if getattr(block, "_chunk_size", None) is not None else None


def with_weights_at_hand(compute: Compute) -> Compute:
    """Make a function of a block see the block's weights even if they are offloaded.

    Offloading brings weights back inside the block's `forward`; a function called before it would find them on another
    device, on disk or empty.
    """

    @wraps(compute)
    def computed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        registry = getattr(module, "_diffusers_hook", None)
        group_offload = registry.get_hook("group_offloading") if registry is not None else None
        hooks: list[Any] = [hook for hook in (group_offload, getattr(module, "_hf_hook", None)) if hook is not None]
        if not hooks:
            return compute(module, args, kwargs)
        for hook in hooks:
            hook.pre_forward(module)
        try:
            return compute(module, args, kwargs)
        finally:
            for hook in reversed(hooks):
                hook.post_forward(module, None)

    return computed


def has_fused_projections(attention: nn.Module) -> bool:
    """Whether queries, keys and values are made in one product. (The module's own flag stays set after unfusing.)"""
    return type(getattr(attention, "processor", None)).__name__.startswith("Fused")


def has_block_cache(model: nn.Module) -> bool:
    """Whether a cache such as FirstBlockCache compares and reuses the outputs of whole blocks."""
    return bool(getattr(model, "is_cache_enabled", False))
