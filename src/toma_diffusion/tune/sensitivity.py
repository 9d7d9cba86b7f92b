"""How much a small error grows until the end, by the blocks and the step in which it is made.

One image is generated as it is. Then, for a group of blocks and a step, it is generated again, and in that step alone
the output of each block of the group gets a random error of 2 % of what the block changes. The growth is how much the
final latents differ, relative to their length, divided by these 2 %.

The error is smooth: random values on a grid of 4 × 4, with straight lines between them, like those that merging and
reuse make. Later steps remove noise that differs from token to token, so it would say nothing about the first steps,
which give the image its composition. On the demo model, smooth errors in all blocks in the first of 20 steps grow ten
times as much as noise does.

The steps before the error are those of the first image. They are not computed again: the outputs of the denoiser are
remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from toma_diffusion.adapters import Block, find_adapter
from toma_diffusion.api import find_denoiser
from toma_diffusion.core import Grid
from toma_diffusion.experiments.shortcuts.base import forwards_restored
from toma_diffusion.hooks.arguments import Arguments, Keywords, given_to
from toma_diffusion.hooks.state import Call, image_start
from toma_diffusion.pipelines.generation import ImageRequest, generate_latents

ERROR = 0.02
"""The error, as a share of what a block changes. Small enough that doubling it doubles its effect, and large enough to
be seen in half precision."""
SMOOTH = 4
"""Random values along each side of the image."""


@dataclass(frozen=True)
class SensitivityMap:
    """The growth of errors."""

    groups: tuple[tuple[int, ...], ...]
    """The indices of the blocks of every group."""
    names: tuple[str, ...]
    """Of the groups."""
    steps: tuple[int, ...]
    """Those that were sampled, of `num_steps`."""
    num_steps: int
    growth: tuple[tuple[float, ...], ...]
    """For every group, the growth from every step."""

    @property
    def by_group(self) -> list[float]:
        """The mean over the steps."""
        return [fmean(row) for row in self.growth]

    @property
    def by_step(self) -> list[float]:
        """The mean over the groups."""
        return [fmean(column) for column in zip(*self.growth, strict=True)]

    def most_sensitive(self, share: float) -> tuple[int, ...]:
        """The indices of about this share of the blocks, in those groups where errors grow most; at least one group,
        and never all."""
        count = sum(len(group) for group in self.groups)
        found: list[int] = []
        for _, group in sorted(zip(self.by_group, self.groups, strict=True), reverse=True)[: len(self.groups) - 1]:
            if found and len(found) + len(group) > share * count:
                break
            found += group
        return tuple(sorted(found))

    def calm_start(self) -> float:
        """The share of the steps after which errors grow less than on average."""
        by_step = self.by_step
        average = fmean(by_step)
        loud = [index for index, growth in enumerate(by_step) if growth > average]
        last = loud[-1] + 1 if loud else 0
        return 0.5 if last >= len(self.steps) else round(self.steps[last] / self.num_steps, 3)

    def calm_window(self, share: float) -> tuple[float, float]:
        """The part of the generation, about this long, in which errors grow least, in tenths of the steps."""
        tenths = range(11 - round(share * 10))
        sums = {
            first: fmean(self._at((first + each + 0.5) / 10) for each in range(round(share * 10))) for first in tenths
        }
        best = min(tenths, key=lambda first: (round(sums[first], 9), first))
        return best / 10, best / 10 + share

    def _at(self, position: float) -> float:
        """The growth from the sampled step nearest to a position from 0 to 1."""
        nearest = min(
            range(len(self.steps)), key=lambda index: abs((self.steps[index] + 0.5) / self.num_steps - position)
        )
        return self.by_step[nearest]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "groups": [list(group) for group in self.groups],
            "names": list(self.names),
            "steps": list(self.steps),
            "num_steps": self.num_steps,
            "growth": [list(row) for row in self.growth],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SensitivityMap:
        """The inverse of `to_dict`."""
        return cls(
            tuple(tuple(group) for group in values["groups"]),
            tuple(values["names"]),
            tuple(values["steps"]),
            values["num_steps"],
            tuple(tuple(row) for row in values["growth"]),
        )


def groups_of(count: int, most: int) -> list[tuple[int, ...]]:
    """So many blocks in at most `most` groups of consecutive ones, as even as possible."""
    groups = min(count, most)
    edges = [count * index // groups for index in range(groups + 1)]
    return [tuple(range(start, end)) for start, end in pairwise(edges)]


def sampled_steps(num_steps: int, most: int) -> tuple[int, ...]:
    """At most `most` steps, spread evenly, the first and the last among them."""
    if num_steps <= most:
        return tuple(range(num_steps))
    return tuple(round(index * (num_steps - 1) / (most - 1)) for index in range(most))


def name_of(blocks: Sequence[Block], group: Sequence[int]) -> str:
    """The first and the last block of a group, without what all names have."""
    short = [blocks[index].name.replace("transformer_blocks.", "").replace("attentions.", "") for index in group]
    return short[0] if len(group) == 1 else f"{short[0]} – {short[-1]}"


class Prober:
    """Measures the growth of errors on one image. The image without errors is generated when it is first needed."""

    def __init__(self, pipe: Any, request: ImageRequest) -> None:
        self.pipe = pipe
        self.request = request
        self.model = find_denoiser(pipe)
        adapter = find_adapter(self.model)
        self.blocks: list[Block] = adapter.blocks(self.model) if adapter else []
        self._adapter = adapter
        self._call: Call | None = None
        self._step = 0
        self._outputs: list[list[Any]] = []
        """Of the denoiser, for every step and call."""
        self._latents: Tensor | None = None

    def growth(self, group: Sequence[int], step: int) -> float:
        """How much an error in these blocks in this step grows."""
        if self._latents is None:
            self._latents = self._original()
        hooks = [
            self.blocks[index].module.register_forward_hook(self._error(index, step), with_kwargs=True)
            for index in group
        ]
        try:
            with self._replaying(before=step):
                latents = self._generate()
        finally:
            for hook in hooks:
                hook.remove()
        difference = torch.linalg.vector_norm(latents.float() - self._latents.float())
        return float(difference / torch.linalg.vector_norm(self._latents.float())) / ERROR

    def _generate(self) -> Tensor:
        self._step = 0
        return generate_latents(self.pipe, self.request, self._next_step)

    def _next_step(self, step: int) -> None:
        self._step = step + 1

    def _original(self) -> Tensor:
        self._outputs = [[] for _ in range(self.request.steps + 1)]

        def remember(module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> None:
            if self._adapter is not None:
                self._call = self._adapter.read_call(module, given_to(module, args, kwargs))
            self._outputs[min(self._step, self.request.steps)].append(output)

        hook = self.model.register_forward_hook(remember, with_kwargs=True)
        try:
            return self._generate()
        finally:
            hook.remove()

    @contextmanager
    def _replaying(self, before: int) -> Iterator[None]:
        """Return remembered outputs in the steps before that one."""
        model: Any = self.model
        compute = model.forward
        calls: list[int] = [0, -1]

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls[0] = calls[0] + 1 if calls[1] == self._step else 0
            calls[1] = self._step
            remembered = self._outputs[self._step] if self._step < before else []
            return remembered[calls[0]] if calls[0] < len(remembered) else compute(*args, **kwargs)

        with forwards_restored(model):
            model.forward = forward
            yield

    def _error(self, index: int, step: int) -> Callable[..., Any]:
        """A hook that adds the error to the image stream of a block."""
        block, call = self.blocks[index], self._call
        if call is None:
            raise RuntimeError("the original image was not generated yet.")
        stream, grid, image_at = block.stream, call.grids[block.kind], call.image_at

        def add(module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
            if self._step != step:
                return output
            tokens = output if stream is None else output[stream]
            before = given_to(module, args, kwargs).tokens
            change = tokens - before if before.shape == tokens.shape else tokens
            noise = smooth_noise(tokens.shape, grid, image_at, seed=index).to(tokens.device)
            noise = noise * ERROR * torch.linalg.vector_norm(change.float()) / torch.linalg.vector_norm(noise)
            changed = (tokens.float() + noise).to(tokens.dtype)
            if stream is None:
                return changed
            return type(output)(changed if place == stream else each for place, each in enumerate(output))

        return add


def smooth_noise(shape: Sequence[int], grid: Grid, image_at: int | None, seed: int) -> Tensor:
    """Random values [batch, tokens, channels] that change slowly over the image, the same for the whole batch. What
    else is in the sequence gets none."""
    _, length, channels = shape
    coarse = torch.randn((1, channels, SMOOTH, SMOOTH), generator=torch.Generator("cpu").manual_seed(seed))
    fine = functional.interpolate(coarse, size=(grid.height, grid.width), mode="bilinear")  # [1, channels, h, w]
    tokens = fine.flatten(2).transpose(1, 2)  # [1, h · w, channels]
    start = image_start(length, image_at, grid)
    return functional.pad(tokens, (0, 0, start, length - start - grid.num_tokens)).expand(tuple(shape))
