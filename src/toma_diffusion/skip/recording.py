"""Keeps what goes into a denoiser and what comes out, while generations run that are learned from; and what these
generations have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toma_diffusion.engine.clock import Tick
from toma_diffusion.errors import UsageError
from toma_diffusion.skip.history import Seen, pair, take_apart, trimmed
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights
from toma_diffusion.skip.levels import Levels
from toma_diffusion.skip.prior import predicted

if TYPE_CHECKING:
    from toma_diffusion.skip.denoiser import Skipper

MOST_VALUES = 2**15
"""Of each sample and each output so many values are kept, evenly spread."""


@dataclass(eq=False)
class Trajectory:
    """One generation: its samples and outputs, by step, as vectors."""

    num_steps: int
    shape: tuple[int, ...] = ()
    """Of a sample."""
    samples: dict[int, Tensor] = field(default_factory=dict)
    """What went in."""
    outputs: dict[int, list[Tensor]] = field(default_factory=dict)
    """What came out, of every pass, computed or predicted."""
    denoisers: dict[int, int] = field(default_factory=dict)
    """Which denoiser ran in a step, by its number, if a pipeline has several."""
    result: Tensor | None = None
    """What the generation ended with, if it is of the same kind as samples."""
    returned: list[Tensor] = field(default_factory=list)
    """The pictures, or whatever the call returned, to compare it with that of other settings."""

    def finish(self, returned: Any = None) -> None:
        """The generation is over, and its call has returned this."""
        if len(self.samples) != self.num_steps:
            raise UsageError(
                f"{len(self.samples)} steps were noted of a generation of {self.num_steps}: learn from generations "
                "that are not interrupted."
            )
        counts = {len(outputs) for outputs in self.outputs.values()}
        if len(counts) != 1:
            raise UsageError(
                f"steps have {' or '.join(map(str, sorted(counts)))} passes: guidance begins or ends half-way, and "
                "weights cannot be learned for that. Learn with guidance in all steps."
            )
        self.returned = [each for leaf in take_apart(returned)[0] if (each := _as_tensor(leaf)) is not None]
        same = (leaf for leaf in self.returned if leaf.is_floating_point() and tuple(leaf.shape) == self.shape)
        self.result = next((_vector([leaf]) for leaf in same), None)
        self.samples = {step: each.cpu() for step, each in self.samples.items()}
        self.outputs = {step: [each.cpu() for each in outputs] for step, outputs in self.outputs.items()}

    @property
    def passes(self) -> int:
        return len(self.outputs[0])

    @property
    def is_whole(self) -> bool:
        """Whether all passes over the last step have been noted."""
        last = self.outputs.get(self.num_steps - 1, ())
        return self.num_steps > 1 and 0 in self.outputs and len(last) == self.passes

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def kind(self) -> tuple[int, int]:
        """Generations of one kind can be learned from together."""
        return self.num_steps, self.passes

    @property
    def required(self) -> list[int]:
        """Steps that must be computed: the first of every denoiser."""
        return sorted({denoiser: step for step, denoiser in sorted(self.denoisers.items(), reverse=True)}.values())


class Recorder:
    """Records generations one after the other, while a denoiser runs in all of their steps or in some."""

    def __init__(self, *, wants_all: bool) -> None:
        self.wants_all = wants_all
        self.current: Trajectory | None = None
        self._generation: int | None = None
        self._models: dict[int, int] = {}

    def note(self, model: nn.Module, tick: Tick, seen: Seen, output: Any) -> None:
        if tick.generation != self._generation:
            if tick.num_steps is None:
                raise UsageError("the number of steps is not known: learn inside a pipeline, or call handle.begin.")
            self._generation, self.current = tick.generation, Trajectory(tick.num_steps)
        current = self.current
        assert current is not None
        leaves = take_apart(output)[0]
        matches = zip(leaves, pair(leaves, seen.samples), strict=True)
        pairs = [(one, other) for one, other in matches if other is not None]
        if not pairs:
            raise UsageError("the output has no tensor of the shape of the noisy sample: nothing can be learned.")
        outputs = [trimmed(output, sample) for output, sample in pairs]
        current.outputs.setdefault(tick.step, []).extend(map(_vector, in_parts(outputs, tick.parts, seen.is_list)))
        if tick.step not in current.samples:
            noisy = in_parts([trimmed(sample, output) for output, sample in pairs], tick.parts, seen.is_list)[0]
            current.shape = tuple(noisy[0].shape) if len(noisy) == 1 else ()
            current.samples[tick.step] = _vector(noisy)
            current.denoisers[tick.step] = self._models.setdefault(id(model), len(self._models))


def in_parts(leaves: Sequence[Tensor], parts: int, is_list: bool) -> list[list[Tensor]]:
    """Views of the halves of guidance that make up a batch."""
    if is_list:
        size = max(1, len(leaves) // parts)
        return [list(leaves[start : start + size]) for start in range(0, len(leaves), size)]
    return [list(each) for each in zip(*(leaf.chunk(parts) for leaf in leaves), strict=True)]


def _as_tensor(leaf: Any) -> Tensor | None:
    """A tensor, an array or a picture, on the CPU; None if it is something else."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    if hasattr(leaf, "tobytes") and hasattr(leaf, "getbands"):
        return torch.frombuffer(bytearray(leaf.tobytes()), dtype=torch.uint8).reshape(*reversed(leaf.size), -1)
    return torch.as_tensor(leaf) if hasattr(leaf, "__array__") else None


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    flat = torch.cat([each.detach().reshape(-1).float() for each in tensors])
    every = -(-flat.numel() // MOST_VALUES) | 1  # odd, so that no row of an image is left out
    return flat[::every].clone()


@dataclass(frozen=True)
class About:
    """What generations have in common."""

    model_class: str
    num_steps: int
    passes: int
    levels: Levels | None
    scheduler: str
    guidance: float | None

    @classmethod
    def of(cls, skippers: Sequence[Skipper], trajectory: Trajectory) -> About:
        """As the last generation noted it."""
        generation = max((skipper.generation for skipper in skippers), key=lambda each: each.number)
        name = type(skippers[0].model).__name__
        return cls(name, *trajectory.kind, generation.levels, generation.scheduler, generation.guidance)

    def prior(self, history: Sequence[int], step: int) -> Weights:
        return predicted(self.levels, history, step)

    def learned(self, steps: Sequence[LearnedSteps]) -> Learned:
        return Learned(
            model_class=self.model_class,
            num_steps=self.num_steps,
            passes=self.passes,
            scheduler=self.scheduler,
            guidance=self.guidance,
            angles=() if self.levels is None else self.levels.angles,
            steps=tuple(steps),
        )

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"levels": None if self.levels is None else dict(vars(self.levels))}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> About:
        levels = values["levels"]
        return cls(**{**values, "levels": None if levels is None else Levels(**levels)})
