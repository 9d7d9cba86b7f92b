"""An adapter describes a model family: its blocks, the places to merge in them, and how to read a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from toma_diffusion.adapters import _diffusers
from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.reuse import Part, PassOn, Stream
from toma_diffusion.hooks.sites import (
    Arguments,
    Hook,
    KeyBias,
    Keywords,
    MergeInput,
    Site,
    UnmergeOutput,
    get_hidden_states,
    never,
)
from toma_diffusion.hooks.state import Call
from toma_diffusion.hooks.summary import BlockRecord


@dataclass(frozen=True)
class SiteSpec:
    """One place where tokens can be merged in `module` scope."""

    name: str
    """Name of the module inside its block."""
    roles: frozenset[str]
    """Which of `attn`, `cross_attn` and `ff` it is. Merged if one of them is in the setting `sites`."""
    hooks: Callable[[Site], list[tuple[str, Hook]]]
    """The hooks that merge before and unmerge after, each with the name of its module inside the block."""
    leave_alone: Callable[[Keywords], bool] = never
    """Whether a call of the module with these keyword arguments must not be merged."""


@dataclass(frozen=True)
class Block:
    """One transformer block."""

    name: str
    module: nn.Module
    kind: str
    """Blocks of one kind have the same grid and the same width, and share a plan."""
    run: str
    """Consecutive blocks of one run may stay merged together in `stage` scope."""
    width: int
    sites: tuple[SiteSpec, ...]
    """In the order in which they run."""
    normalize: Callable[[nn.Module, Arguments, Keywords], Tensor]
    """Computes the tokens that the first layer of the block gets. Destinations are selected among them."""
    position_table: str | None = None
    """Name of the keyword argument that holds position tables with one row per token, such as RoPE."""
    key_bias: KeyBias | None = None
    """How the block takes a bias for the keys of its self-attention; None if it takes none."""
    stream: int | None = None
    """Which of the block's outputs is the image stream; None if it returns one tensor."""
    returns_text: bool = False
    """Whether the other of its two outputs is the text stream. The last block of a model may return none."""
    level: int = 0
    """How often the grid was halved before this block. 0 if the model has one resolution."""
    feed_forward_chunk_dim: int | None = None
    """The dimension along which the feed-forward layer is called on chunks, if it is."""

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


class Adapter(ABC):
    """Support for one model family. Register your own with `register_adapter`."""

    supports: str
    """The model class and what it covers, for error messages."""

    @abstractmethod
    def matches(self, model: nn.Module) -> bool:
        """Whether this adapter is for `model`."""

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[Block]:
        """The transformer blocks, in the order in which they run."""

    @abstractmethod
    def read_call(self, model: nn.Module, args: Arguments, kwargs: Keywords) -> Call:
        """The facts about one call of the denoiser. Must not read values of tensors in the denoising loop."""

    def parts(self, model: nn.Module, deep: bool) -> list[Part]:
        """What can be reused over time: runs of blocks. With `deep`, all that can be, if there is more."""
        return [part_of(list(blocks)) for _, blocks in groupby(self.blocks(model), key=lambda block: block.run)]

    def defaults(self, model: nn.Module) -> dict[str, Any]:
        """Settings of this family, for fields that the user does not set. Fields that a method does not have are
        ignored."""
        return {}


@dataclass(frozen=True)
class ImageShape:
    """The shape of image tokens."""

    kind: str
    width: int

    def __call__(self, call: Call) -> tuple[int, ...]:
        """In that call."""
        return call.sample.shape[0], call.image_tokens or call.grids[self.kind].num_tokens, self.width


@dataclass(frozen=True)
class TextShape:
    """The shape of text tokens that go through the blocks."""

    width: int

    def __call__(self, call: Call) -> tuple[int, ...]:
        """In that call."""
        if call.conditioning is None:
            raise UsageError("a call without text cannot be reused over time: pass encoder_hidden_states.")
        return call.sample.shape[0], call.conditioning.shape[1], self.width


def part_of(blocks: list[Block]) -> Part:
    """Consecutive blocks as a part that can be reused."""
    first, last = blocks[0], blocks[-1]
    streams = [Stream(ImageShape(last.kind, last.width), last.stream, "hidden_states", 0)]
    if last.returns_text and last.stream is not None:
        streams.append(Stream(TextShape(last.width), 1 - last.stream, "encoder_hidden_states", 1))
    return Part(
        name=first.run if len(blocks) > 1 else first.name,
        modules=tuple(block.module for block in blocks),
        stand_ins=tuple(PassOn(block.stream) for block in blocks),
        streams=tuple(streams),
    )


def around(
    name: str, key_bias: KeyBias | None = None, check: Callable[[Keywords], object] = never
) -> Callable[[Site], list[tuple[str, Hook]]]:
    """Hooks that merge before a module of the block and unmerge after it. `check` raises for calls that cannot be."""
    return lambda site: [(name, MergeInput(site, key_bias=key_bias, check=check)), (name, UnmergeOutput(site))]


@dataclass(frozen=True)
class AfterModulatingNorm:
    """The tokens after the norm of that name, which is modulated by the time embedding `temb`."""

    name: str

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> Tensor:
        """Compute them before the block runs."""
        norm = getattr(module, self.name)
        with _diffusers.weights_loaded(module):
            normalized: Tensor = norm(get_hidden_states(args, kwargs), emb=argument("temb", 2, args, kwargs))[0]
        return normalized


def argument(name: str, index: int, args: Arguments, kwargs: Keywords) -> Any:
    """An argument passed by name or by position; None if it is not passed."""
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else None
