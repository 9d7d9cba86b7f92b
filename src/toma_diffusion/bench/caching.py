"""Timing with diffusers' first-block cache, which skips all but the first block where that one changes little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toma_diffusion.adapters import find_adapter
from toma_diffusion.bench.timing import Generation


def enable(model: Any, threshold: float) -> None:
    """Switch the cache on. Call it before `apply_toma`, which then does not merge blocks that the cache compares."""
    import diffusers

    config: Any = diffusers.FirstBlockCacheConfig
    model.enable_cache(config(threshold=threshold))


def moving_calls(inputs: dict[str, Any], sample: str, steps: int) -> list[dict[str, Any]]:
    """The same call for every step, with a sample that goes on a straight line from noise towards another tensor.

    That is the path of a flow model, so that successive samples differ as much as they do in an image.
    """
    start: Tensor = inputs[sample]
    end = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)).to(start)
    return [inputs | {sample: torch.lerp(start, end, step / steps)} for step in range(steps)]


def share_of_hits(generation: Generation) -> float:
    """The fraction of steps in which the cache skipped blocks, counted at the attention of a block in the middle.

    The block itself is called in any case; the cache replaces its forward. Call it before compiling.
    """
    adapter = find_adapter(generation.model)
    blocks = adapter.blocks(generation.model) if adapter else []
    middle = blocks[len(blocks) // 2].module
    attention = next(child for name, child in middle.named_children() if name.startswith("attn"))
    calls: list[None] = []
    hook = attention.register_forward_pre_hook(lambda module, args: calls.append(None))
    try:
        generation.run()
    finally:
        hook.remove()
    return 1 - len(calls) / len(generation.calls)
