"""An adapter describes a model family: its blocks, the places to merge in them, and how to read a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.sites import KeyBias, MergeInput, PerToken, Site, UnmergeOutput, never
from toma_diffusion.merge.state import BlockRecord, Call


@dataclass(frozen=True)
class SiteSpec:
    """One place where tokens can be merged in `module` scope."""

    name: str
    """Name of the module inside its block."""
    roles: frozenset[str]
    """Which of `attn`, `cross_attn` and `ff` it is. Merged if one of them is in the setting `sites`."""
    hooks: Callable[[Site], list[tuple[str, Hook]]]
    """The hooks that merge before and unmerge after, each with the name of its module inside the block."""
    leave_alone: Callable[[Given], bool] = never
    """Whether a call of the module with these arguments must not be merged."""


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    name: str
    module: nn.Module
    kind: str
    """Blocks of one kind have the same grid and the same width, and share a plan."""
    width: int
    sites: tuple[SiteSpec, ...]
    """In the order in which they run."""
    normalize: Callable[[nn.Module, Given], Tensor]
    """Computes the tokens that the first layer of the block gets. Destinations are selected among them."""
    run: str = ""
    """Consecutive blocks of one run may stay merged together in `stage` scope. Default: its name without the last
    number."""
    per_token: tuple[PerToken, ...] = ()
    """The arguments of the block, besides the tokens, that have a row for every token: positions, masks."""
    key_bias: KeyBias | None = None
    """How the block takes a bias for the keys of its self-attention; None if it takes none."""
    stream: int | None = None
    """Which of the block's outputs is the image stream; None if it returns one tensor."""
    takes_other_keys: bool = False
    """Whether self-attention takes other tokens for its keys, in the argument in which cross-attention gets text."""
    writes_in_place: bool = False
    """Whether the block, or the model after it, writes into the tensors that it passes on."""
    level: int = 0
    """How often the grid was halved before this block. 0 if the model has one resolution."""
    feed_forward_chunk_dim: int | None = None
    """The dimension along which the feed-forward layer is called on chunks, if it is."""

    def __post_init__(self) -> None:
        if not self.run:
            object.__setattr__(self, "run", self.name.rpartition(".")[0])

    def chosen_sites(self, roles: Iterable[str]) -> list[SiteSpec]:
        """The places to merge that have one of these roles."""
        specs = [spec for spec in self.sites if spec.roles & set(roles)]
        if self.feed_forward_chunk_dim is not None and any("ff" in spec.roles for spec in specs):
            raise UsageError(
                f"{self.name} feeds its feed-forward layer in pieces (set_chunk_feed_forward, "
                f"dim={self.feed_forward_chunk_dim}), which cannot be merged: switch that off, or leave 'ff' out of "
                "the sites."
            )
        return specs

    def record(self, specs: Iterable[SiteSpec], left_alone: str | None) -> BlockRecord:
        """For the summary: what is merged in this block, or why nothing is."""
        names = tuple(f"{self.name}.{spec.name}" for spec in specs) if left_alone is None else ()
        return BlockRecord(self.name, self.kind, self.width, names, len(names), left_alone)


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after another, and are described alike."""

    name: str
    """Of the list of blocks in the model."""
    describe: Callable[[Any, str], Block]
    """Makes a `Block` of a module and its name."""
    left_whole: float = 0.0
    """The share of its blocks, from the first, that are not merged by default."""

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """In the model."""
        return list(model.get_submodule(self.name).children())


class Adapter(ABC):
    """Support for one model family. Register your own with `register_adapter`."""

    model_class: str = ""
    """The name of its class in diffusers."""
    supports: str
    """The model class and what it covers, for error messages."""
    untraceable: str | None = None
    """Why torch.compile cannot trace a whole call of the model, if so. Its blocks can be compiled."""

    def matches(self, model: nn.Module) -> bool:
        """Whether this adapter is for `model`."""
        return bool(self.model_class) and upstream.is_instance(model, self.model_class)

    def obstacle(self, model: Any) -> str | None:
        """Why no tokens can be merged in this model, if so. Its steps can be skipped."""
        return None

    def stacks(self, model: Any) -> list[Stack]:
        """The stacks of transformer blocks, in the order in which they run. Override this, or `blocks`."""
        return []

    def blocks(self, model: nn.Module) -> list[Block]:
        """The transformer blocks, in the order in which they run."""
        return [
            stack.describe(module, f"{stack.name}.{index}")
            for stack in self.stacks(model)
            for index, module in enumerate(stack.modules(model))
        ]

    @abstractmethod
    def read_call(self, model: nn.Module, given: Given) -> Call:
        """The facts about one call of the denoiser. Must not read values of tensors in the denoising loop."""

    def is_joint(self, model: nn.Module) -> bool:
        """Whether all samples of a batch share their destinations, because they have one table of positions."""
        return any(block.per_token for block in self.blocks(model))

    def defaults(self, model: nn.Module) -> dict[str, Any]:
        """Settings of this family, for fields that the user does not set. Fields that a method does not have are
        ignored. By default those of `leave_first`, if stacks leave first blocks whole."""
        stacks = [(len(stack.modules(model)), stack.left_whole) for stack in self.stacks(model)]
        return leave_first(*stacks) if any(share for _, share in stacks) else {}


def around(
    name: str,
    *per_token: PerToken,
    key_bias: KeyBias | None = None,
    check: Callable[[Given], object] = never,
    streams: tuple[int, ...] = (0,),
) -> Callable[[Site], list[tuple[str, Hook]]]:
    """Hooks that merge before a module of the block and unmerge after it.

    Args:
        name: of the module in the block.
        per_token: arguments of the module, besides the tokens, that have a row for every token.
        key_bias: how its attention takes a bias for the keys.
        check: raises for calls that cannot be merged.
        streams: which of several outputs are image streams.
    """
    return lambda site: [(name, MergeInput(site, per_token, key_bias, check)), (name, UnmergeOutput(site, streams))]


@dataclass(frozen=True)
class AfterModulatingNorm:
    """The tokens after the norm of that name, which is modulated by the time embedding `temb`."""

    name: str

    def __call__(self, module: nn.Module, given: Given) -> Tensor:
        """Compute them before the block runs."""
        norm = getattr(module, self.name)
        with upstream.weights_loaded(module):
            normalized: Tensor = norm(given.tokens, emb=given["temb"])[0]
        return normalized


@dataclass(frozen=True)
class Before:
    """The tokens that a function computes from a block and its arguments, with the weights of the block loaded."""

    compute: Callable[[Any, Given], Tensor]

    def __call__(self, module: nn.Module, given: Given) -> Tensor:
        """Compute them before the block runs."""
        with upstream.weights_loaded(module):
            return self.compute(module, given)


def adds_residuals(given: Given, *names: str) -> str | None:
    """The reason to merge block by block if one of these arguments of the model holds residuals of a ControlNet."""
    controlled = any(given[name] is not None for name in names)
    return "a ControlNet adds its residuals after every block" if controlled else None


def leave_first(*stacks: tuple[int, float]) -> dict[str, Any]:
    """Defaults of large transformers: select in every step, and leave the first blocks of every stack whole.

    In them text and image are combined. The paper leaves the first quarter of the joint and the first eighth of the
    single blocks of Flux.1 whole.

    Args:
        stacks: for each its number of blocks, and the share that is left whole.
    """
    skipped: list[int] = []
    start = 0
    for count, share in stacks:
        skipped += range(start, start + round(share * count))
        start += count
    return {"select_every": 1, "reweigh_every": 1, "skip_blocks": tuple(skipped)}
