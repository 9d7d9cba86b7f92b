"""How much a small error grows until the end, by the blocks and the step in which it is made.

One image or clip is generated as it is. Then, for a group of blocks and a step, it is generated again, and in that step
alone the output of each block of the group gets a random error of 2 % of what the block changes. The growth is how much
the final latents differ, relative to their length, divided by these 2 %.

The error is smooth: random values on a grid of 4 × 4, of a clip 4 × 4 × 4, with straight lines between them, like those
of merging and of predicted outputs. Later steps remove noise that differs from token to token, so it would say nothing
about the first steps, which give the image its composition. On the demo model, smooth errors in all blocks in the first
of 20 steps grow ten times as much as noise does.

The steps before the error are those of the first image. They are not computed again: the outputs of the denoiser are
remembered. If several denoisers take turns, the error is made in the same blocks of the one whose step it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from toma_diffusion.engine.arguments import Arguments, Keywords, given_to
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.families import Block, find_family
from toma_diffusion.merge import Grid
from toma_diffusion.merge.state import Call, image_start
from toma_lab.columns.base import forwards_restored
from toma_lab.pipelines.clips import latents_of
from toma_lab.pipelines.generation import ImageRequest

ERROR = 0.02
"""The error, as a share of what a block changes. Small enough that doubling it doubles its effect, and large enough to
be seen in half precision."""
FEWEST_STEPS = 2
"""That all pipelines take: Mochi does not take one."""
SMOOTH = 4
"""Random values along each side of the image, and over the frames of a clip."""


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

    def computed_steps(self, share: float) -> tuple[int, ...]:
        """This share of the steps, close together where errors grow most: about the same growth lies between any two
        that follow each other."""
        growth = [self._at((step + 0.5) / self.num_steps) for step in range(self.num_steps)]
        count, reached = max(1, round(share * self.num_steps)), 0.0
        chosen: list[int] = []
        for step in range(self.num_steps):
            wanted = count - len(chosen)
            if wanted and (reached >= len(chosen) / count * sum(growth) or wanted == self.num_steps - step):
                chosen.append(step)
            reached += growth[step]
        return tuple(chosen)

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
    """Measures the growth of errors on one image or clip. That without errors is generated when it is first needed."""

    def __init__(self, pipe: Any, request: ImageRequest) -> None:
        self.pipe = pipe
        self.request = request
        self.models = find_denoisers(pipe)
        self._family = find_family(self.models[0])
        self._blocks = [self._family.blocks(model) if self._family else [] for model in self.models]
        self._call: Call | None = None
        self._step = 0
        self._outputs: list[list[Any]] = []
        """Of the denoiser, for every step and call."""
        self._latents: Tensor | None = None
        self._seconds = 0.0

    @property
    def blocks(self) -> list[Block]:
        """Those of the first denoiser. If there are others, theirs are alike."""
        return self._blocks[0]

    @property
    def grid(self) -> Grid | None:
        """That of the tokens; None if they are not known. Takes a few steps if nothing was generated yet."""
        if self._call is None and self._family is not None:
            with self._remembering():
                self._generate(replace(self.request, steps=FEWEST_STEPS))
        return next(iter(self._call.grids.values())) if self._call is not None else None

    def growth(self, group: Sequence[int], step: int) -> float:
        """How much an error in these blocks in this step grows."""
        original, _ = self.original()
        hooks = [
            blocks[index].module.register_forward_hook(self._error(index, step), with_kwargs=True)
            for index in group
            for blocks in self._blocks
        ]
        try:
            with self._replaying(before=step):
                latents = self._generate(self.request)
        finally:
            for hook in hooks:
                hook.remove()
        difference = torch.linalg.vector_norm(latents.float() - original.float())
        return float(difference / torch.linalg.vector_norm(original.float())) / ERROR

    def original(self) -> tuple[Tensor, float]:
        """The latents without errors, and how many seconds they took."""
        if self._latents is None:
            started = perf_counter()
            with self._remembering():
                self._latents = self._generate(self.request)
            float(self._latents.flatten()[0])  # waits for the GPU
            self._seconds = perf_counter() - started
        return self._latents, self._seconds

    def forget(self) -> None:
        """Free what is remembered: of a long clip it may be a gigabyte."""
        self._outputs, self._latents = [], None

    def _generate(self, request: ImageRequest) -> Tensor:
        self._step = 0
        return latents_of(self.pipe, request, self._next_step)

    def _next_step(self, step: int) -> None:
        self._step = step + 1

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Remember the outputs of the denoisers by steps."""
        self._outputs = [[] for _ in range(self.request.steps + 1)]

        def remember(module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> None:
            if self._family is not None:
                self._call = self._family.read_call(module, given_to(module, args, kwargs))
            self._outputs[min(self._step, self.request.steps)].append(output)

        hooks = [model.register_forward_hook(remember, with_kwargs=True) for model in self.models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _replaying(self, before: int) -> Iterator[None]:
        """Return remembered outputs in the steps before that one."""
        calls: list[int] = [0, -1]

        def replaying(compute: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                calls[0] = calls[0] + 1 if calls[1] == self._step else 0
                calls[1] = self._step
                remembered = self._outputs[self._step] if self._step < before else []
                return remembered[calls[0]] if calls[0] < len(remembered) else compute(*args, **kwargs)

            return forward

        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(forwards_restored(model))
                cast(Any, model).forward = replaying(model.forward)
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
    """Random values [batch, tokens, channels] that change slowly over the image and over frames, the same for the whole
    batch. What else is in the sequence gets none."""
    _, length, channels = shape
    over_frames = (grid.frames,) if grid.frames > 1 else ()
    corners = (SMOOTH,) * (2 + len(over_frames))
    coarse = torch.randn((1, channels, *corners), generator=torch.Generator("cpu").manual_seed(seed))
    mode = "trilinear" if over_frames else "bilinear"
    fine = functional.interpolate(coarse, size=(*over_frames, grid.height, grid.width), mode=mode)
    tokens = fine.flatten(2).transpose(1, 2)  # [1, frames · h · w, channels]
    start = image_start(length, image_at, grid)
    return functional.pad(tokens, (0, 0, start, length - start - grid.num_tokens)).expand(tuple(shape))
