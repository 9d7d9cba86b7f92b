"""Sees the tokens that every transformer block gets in every step of a generation, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toma_diffusion.adapters import Block, find_adapter, supported
from toma_diffusion.api import find_denoiser
from toma_diffusion.core import Grid
from toma_diffusion.hooks.clock import StepClock, Tick
from toma_diffusion.hooks.handle import find_root
from toma_diffusion.hooks.state import Call


@dataclass(frozen=True)
class Sight:
    """What one block sees in one step."""

    step: int
    block: str
    """Its name."""
    kind: str
    """Blocks of one kind see the same grid at the same width."""
    grid: Grid
    tokens: Tensor
    """[N, d], after the block's first norm, where ToMA chooses destinations. Of the last sample: with classifier-free
    guidance the half that follows the prompt."""


@contextmanager
def watch(pipe: Any, see: Callable[[Sight], None]) -> Iterator[list[Block]]:
    """Have `see` called at every transformer block in every step of a pipeline in which nothing is merged.

    Where a step takes several passes over the model, the first one counts. Yields the blocks.
    """
    model = find_denoiser(pipe)
    adapter = find_adapter(model)
    if adapter is None:
        raise ValueError(f"{type(model).__name__} is not supported. Supported are: {supported()}.")
    if find_root(model) is not None:
        raise RuntimeError(f"tokens are merged in this {type(model).__name__}: call remove_toma first.")
    clock = StepClock(pipe)
    now: dict[str, Any] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = adapter.read_call(module, args, kwargs)
        now.update(call=call, tick=clock.tick(call.sample, call.conditioning))

    def look(block: Block) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call: Call = now["call"]
            tick: Tick = now["tick"]
            if tick.ordinal > 0:
                return
            grid = call.grids[block.kind]
            sequence = block.normalize(module, args, kwargs)[-1]  # text may come before the image, references after it
            start = len(sequence) - (call.image_tokens or grid.num_tokens)
            tokens = sequence[start : start + grid.num_tokens].detach().float()
            see(Sight(tick.step, block.name, block.kind, grid, tokens))

        return hook

    blocks = adapter.blocks(model)
    handles = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    handles += [block.module.register_forward_pre_hook(look(block), with_kwargs=True) for block in blocks]
    try:
        yield blocks
    finally:
        for handle in handles:
            handle.remove()
