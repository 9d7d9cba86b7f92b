"""Reads the tokens that enter every transformer block in every step of a generation. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toma_diffusion.engine.arguments import given_to
from toma_diffusion.engine.clock import StepCounter, Tick
from toma_diffusion.engine.install import find_denoisers, find_root
from toma_diffusion.families import Block, find_family, unsupported
from toma_diffusion.merge import Grid
from toma_diffusion.merge.state import Call, image_start


@dataclass(frozen=True)
class BlockInput:
    """The input of one block in one step."""

    step: int
    block: str
    """Name of the block."""
    kind: str
    """Blocks of one kind have the same grid and the same width."""
    grid: Grid
    tokens: Tensor
    """[N, d], after the block's first norm, where ToMA chooses destinations. They are those of the last sample: with
    classifier-free guidance, the half with the prompt."""


@contextmanager
def watch(pipe: Any, on_block: Callable[[BlockInput], None]) -> Iterator[list[Block]]:
    """Call `on_block` for every transformer block in every step of a pipeline that was not sped up. Yields the blocks.

    If a step needs several passes over the model, only the first is reported.
    """
    model = find_denoisers(pipe)[0]
    family = find_family(model)
    if family is None:
        raise unsupported(model)
    if find_root(model) is not None:
        raise RuntimeError(f"this {type(model).__name__} was sped up: call handle.remove() first.")
    steps = StepCounter(pipe)
    now: dict[str, Any] = {}

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = family.read_call(module, given_to(module, args, kwargs))
        tick = steps.read(module, call.sample, call.conditioning, call.timestep, call.batch_size)
        now.update(call=call, tick=tick)

    def look(block: Block) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call: Call = now["call"]
            tick: Tick = now["tick"]
            if tick.pass_index > 0:
                return
            grid = call.grids[block.kind]
            sequence = block.normalize(module, given_to(module, args, kwargs))[-1]  # not only the image
            start = image_start(len(sequence), call.image_at, grid)
            tokens = sequence[start : start + grid.num_tokens].detach().float()
            on_block(BlockInput(tick.step, block.name, block.kind, grid, tokens))

        return hook

    blocks = family.blocks(model)
    handles = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    handles += [block.module.register_forward_pre_hook(look(block), with_kwargs=True) for block in blocks]
    try:
        yield blocks
    finally:
        for handle in handles:
            handle.remove()
