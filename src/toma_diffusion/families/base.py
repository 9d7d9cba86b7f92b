"""A family describes a model class: its blocks, the places to merge in them, and how to read a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.families.grids import IdReader, grid_from_ids
from toma_diffusion.merge import Grid
from toma_diffusion.merge.block import Block
from toma_diffusion.merge.sites import MergeInput, PerToken, Site, UnmergeOutput, never
from toma_diffusion.merge.state import Call

Builder = Callable[..., Block]
"""Makes a `Block` of a module, its name and its kind."""


@dataclass(frozen=True)
class Stack:
    """Blocks of one kind that run one after another."""

    name: str
    """Of the list of blocks in the model."""
    kind: str
    build: Builder
    """One of `families.builders`."""
    left_whole: float = 0
    """How many of its blocks, from the first, are not merged by default: a share of them, or from 1 on their number."""

    def modules(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.name).children())

    def blocks(self, model: nn.Module) -> list[Block]:
        return [
            self.build(module, f"{self.name}.{index}", self.kind) for index, module in enumerate(self.modules(model))
        ]


class Family(ABC):
    """Support for one model family. Register your own with `register_family`."""

    model_class: ClassVar[str] = ""
    """The name of its class in diffusers."""
    supports: ClassVar[str]
    """The model class and what it covers, for error messages."""
    stacks: ClassVar[tuple[Stack, ...]] = ()
    """The stacks of transformer blocks, in the order in which they run. Set this, or override `blocks`."""
    one_table: ClassVar[bool] = False
    """Whether all samples of a batch have one table of positions. They then share their destinations."""
    untraceable: ClassVar[str | None] = None
    """Why torch.compile cannot trace a whole call of the model, if so. Its blocks can be compiled."""

    def __init__(self) -> None:
        self.ids = IdReader(grid_from_ids)

    def matches(self, model: nn.Module) -> bool:
        return bool(self.model_class) and upstream.is_instance(model, self.model_class)

    def obstacle(self, model: Any) -> str | None:
        """Why no tokens can be merged in this model, if so. Its steps can be skipped."""
        return None

    def blocks(self, model: nn.Module) -> list[Block]:
        """The transformer blocks, in the order in which they run."""
        return [block for stack in self.stacks for block in stack.blocks(model)]

    @abstractmethod
    def read_call(self, model: nn.Module, given: Given) -> Call:
        """The facts about one call of the denoiser. Must not read values of tensors in the denoising loop."""

    def call(self, model: nn.Module, given: Given, grid: Grid | None = None, **facts: Any) -> Call:
        """What `read_call` returns, from the names of arguments that most models of diffusers have.

        Args:
            grid: of all kinds of block; or pass `grids`.
            facts: other fields of `Call`, and those that are different.
        """
        usual = {
            "sample": given["hidden_states"],
            "conditioning": given["encoder_hidden_states"],
            "timestep": given["timestep"],
            "grids": {stack.kind: grid for stack in self.stacks},
            "joint": self.is_joint(model),
        }
        return Call(**usual | facts)

    def is_joint(self, model: Any) -> bool:
        """Whether all samples of a batch share their destinations in this model."""
        return self.one_table

    def skip_blocks(self, model: nn.Module) -> tuple[int, ...] | None:
        """The blocks that are left whole unless the user says which, by their indices. None: the family does not mind.

        Default: the first ones of every stack with `left_whole`. In them text and image are combined. The paper leaves
        the first quarter of the joint and the first eighth of the single blocks of Flux.1 whole.
        """
        if not any(stack.left_whole for stack in self.stacks):
            return None
        found: list[int] = []
        start = 0
        for stack in self.stacks:
            count, whole = len(stack.modules(model)), stack.left_whole
            found += range(start, start + min(count, round(whole * count if whole < 1 else whole)))
            start += count
        return tuple(found)

    def selects_every_step(self, model: nn.Module) -> bool:
        """Whether the paper's variants select in every step: they do in Flux; in U-Nets in every tenth."""
        return self.skip_blocks(model) is not None


def around(
    name: str,
    *per_token: PerToken,
    check: Callable[[Given], object] = never,
    streams: tuple[int, ...] = (0,),
) -> Callable[[Site], list[tuple[str, Hook]]]:
    """Hooks that merge before a module of the block and unmerge after it.

    Args:
        name: of the module in the block.
        per_token: arguments of the module, besides the tokens, that have a row for every token.
        check: raises for calls that cannot be merged.
        streams: which of several outputs are image streams.
    """
    return lambda site: [(name, MergeInput(site, per_token, check=check)), (name, UnmergeOutput(site, streams))]


def adds_residuals(given: Given, *names: str) -> str | None:
    """The reason to merge block by block if one of these arguments of the model holds residuals of a ControlNet."""
    controlled = any(given[name] is not None for name in names)
    return "a ControlNet adds its residuals after every block" if controlled else None
