"""Keeps what goes into a denoiser and what comes out, while generations run that are learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.step import Tick
from toma_diffusion.skip.history import Seen, pair, take_apart, trimmed

MOST_VALUES = 2**15
"""Of each tensor so many values are kept, evenly spread."""


@dataclass(eq=False)
class Trajectory:
    """One generation: its samples and outputs, by step, as vectors."""

    samples: dict[int, Tensor] = field(default_factory=dict)
    """What went in."""
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """What came out, of every pass; only of computed steps."""
    denoisers: dict[int, int] = field(default_factory=dict)
    """Which denoiser made a step, if a pipeline has several."""
    result: Tensor | None = None
    """What the generation ended with, if it is of the same kind as samples."""

    @property
    def num_steps(self) -> int:
        """How many there were."""
        return len(self.samples)

    @property
    def passes(self) -> int:
        """Over a step. Raises `UsageError` if they are not always as many."""
        counts = {len(outputs) for outputs in self.outputs.values()}
        if len(counts) != 1:
            raise UsageError(
                f"steps have {' or '.join(map(str, sorted(counts)))} passes: guidance begins or ends half-way, and "
                "weights cannot be learned for that. Learn with guidance in all steps."
            )
        return counts.pop()


class Recorder:
    """Records one generation after the other."""

    def __init__(self, wants_all: bool) -> None:
        self.wants_all = wants_all
        self.trajectories: list[Trajectory] = []
        self._generation: int | None = None

    def note(self, model: nn.Module, tick: Tick, seen: Seen, output: Any, *, computed: bool) -> None:
        """A call of the denoiser, and what it returned, computed or predicted."""
        if tick.generation != self._generation:
            self._generation = tick.generation
            self.trajectories.append(Trajectory())
        current = self.trajectories[-1]
        leaves = take_apart(output)[0]
        pairs = [(one, other) for one, other in zip(leaves, pair(leaves, seen.samples), strict=True) if other is not None]
        if not pairs:
            raise UsageError("the output has no tensor of the shape of the noisy sample: nothing can be learned.")
        if computed:
            for part in _split([trimmed(output, sample) for output, sample in pairs], tick.parts):
                current.outputs.setdefault(tick.step, []).append(_vector(part))
        if tick.step not in current.samples:
            noisy = [trimmed(sample, output) for output, sample in pairs]
            current.samples[tick.step] = _vector(_split(noisy, tick.parts)[0])
            current.denoisers[tick.step] = id(model)

    def end(self, result: Any) -> None:
        """The generation has returned this."""
        current = self.trajectories[-1]
        like = current.samples[0]
        tensors = [leaf for leaf in take_apart(result)[0] if isinstance(leaf, Tensor)]
        vectors = [_vector([each]) for each in tensors]
        current.result = next((each for each in vectors if each.shape == like.shape), None)
        self._generation = None


def _split(leaves: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """Into the halves of guidance that make up a batch."""
    if parts == 1:
        return [list(leaves)]
    if len(leaves) % parts == 0 and len(leaves) > 1:  # several samples in a list
        size = len(leaves) // parts
        return [list(leaves[index * size : (index + 1) * size]) for index in range(parts)]
    return [list(each) for each in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)]


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    rows = [each.detach().flatten(1) if each.ndim > 1 else each.detach()[None] for each in tensors]
    most = max(1, MOST_VALUES // sum(len(each) for each in rows))
    return torch.cat([each[:, :: -(-each.shape[1] // most)].reshape(-1) for each in rows]).float().cpu()
