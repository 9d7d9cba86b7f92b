"""How these tests merge tokens: the one place that calls the library for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from observe import state_of
from tiny import Family, output_of
from torch import Tensor, nn

from toma_diffusion import Handle, Merge, Skip, speed_up
from toma_diffusion.merge import MergePlan

SETTINGS = {"ratio": 0.5, "num_regions": 4, "skip_blocks": (), "scope": "module"}
"""Small regions for small grids, and no block left alone."""
ONE_PLAN = {"share_plan": True, "guidance_parts": 1}
"""One plan for a kind of block and a pass, as in the paper: what is computed in a step is easily counted."""


def merged(pipe: Any, skip: Skip | None = None, **changes: Any) -> Handle:
    """Merge tokens with `SETTINGS` and these changes."""
    return speed_up(pipe, merge=Merge(**SETTINGS | changes), skip=skip)


def steady(pipe: Any, skip: Skip | None = None, **changes: Any) -> Handle:
    """The same with destinations that depend on nothing, for comparisons that allow for rounding: it may turn a greedy
    choice."""
    handle = merged(pipe, skip, **changes)
    for model in handle.models:
        state = state_of(model)
        for slot in state.slots:
            slot.make = partial(SteadyPlan, config=state.config)
    return handle


class SteadyPlan(MergePlan):
    """Every n-th token of a region is a destination."""

    def choose(self, tokens: Tensor) -> Tensor:
        count = self.destinations_per_region
        chosen = torch.arange(count, device=tokens.device) * self.regions.size // count
        return chosen.expand(1, self.regions.count, count)


def remove(pipe: Any) -> None:
    """As it was before."""
    Handle.of(pipe).remove()


def call(family: Family, model: nn.Module, **extra: Any) -> Tensor:
    """`extra` goes to the model, on top of the family's inputs."""
    return output_of(model, family.inputs() | extra)


def steady_call(family: Family, scope: str = "module", **extra: Any) -> Tensor:
    """From a fresh model, merged and called once."""
    model = family.build()
    steady(model, scope=scope)
    return call(family, model, **extra)
