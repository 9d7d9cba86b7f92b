"""Timing with diffusers' first-block cache, which skips all but the first block where that one changes little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toma_lab.bench.timing import Generation
from toma_lab.experiments.shortcuts.skipped import SkippedSteps


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
    """The fraction of steps in which the cache skipped blocks. Call it before compiling."""
    with SkippedSteps(generation.model) as skipped:
        generation.run()
    return skipped.share
