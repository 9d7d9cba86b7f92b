"""The only file that touches private names of diffusers and of torch's module wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile(module)`."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_instance(model: nn.Module, class_name: str) -> bool:
    """Whether `model` is of a diffusers class, which is looked up only now: importing diffusers takes seconds."""
    import diffusers

    model_class: Any = getattr(diffusers, class_name, None)
    return model_class is not None and isinstance(model, model_class)


def chunks_tokens(block: nn.Module) -> bool:
    """Whether `set_chunk_feed_forward(dim=1)` is on: the feed-forward layer then sees pieces of the sequence."""
    return getattr(block, "_chunk_size", None) is not None and getattr(block, "_chunk_dim", 0) == 1


def has_block_cache(model: nn.Module) -> bool:
    """Whether a cache such as FirstBlockCache compares and reuses the outputs of whole blocks."""
    return bool(getattr(model, "is_cache_enabled", False))
