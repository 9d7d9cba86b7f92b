"""What a denoiser returned in earlier steps, and the weighted sum that takes the place of its next output.

The passes over a step, such as the two halves of guidance, are each predicted from their own outputs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.clock import Identity, Tick
from toma_diffusion.skip.learned import Weights

SAMPLES = ("sample", "hidden_states", "x", "img", "latents")
"""What denoisers call their noisy sample. Of others it is the first argument."""
TIMESTEPS = ("sigma", "timestep", "timesteps", "t", "time")
CONDITIONINGS = ("encoder_hidden_states", "cap_feats", "context", "prompt_embeds", "txt", "text_hidden_states")
ALSO_SAMPLES = ("audio_hidden_states",)
"""Other noisy samples of the same call."""


@dataclass(frozen=True)
class Seen:
    """What is known of a call of any denoiser."""

    sample: Tensor
    """Of several samples in a list, the first."""
    conditioning: Any
    timestep: Any
    batch: int
    samples: tuple[Tensor, ...]
    """All noisy samples that go in: of a list, and of other kinds, such as audio."""
    is_list: bool = False
    """Whether the samples of a batch come as a list."""

    @classmethod
    def of(cls, given: Given) -> Seen | None:
        """From the arguments of the call; None if it has no noisy sample."""
        noisy = _first(given, SAMPLES)
        if noisy is None and (given.args or given.names):
            noisy = given.args[0] if given.args else given.kwargs.get(given.names[0])
        samples = list(_tensors(noisy))
        if not samples:
            return None
        others = [each for name in ALSO_SAMPLES for each in _tensors(given[name])]
        conditioning = next(_tensors(_first(given, CONDITIONINGS)), None)
        is_list = isinstance(noisy, (list, tuple))
        batch = len(samples) if is_list else samples[0].shape[0]
        return cls(samples[0], conditioning, _first(given, TIMESTEPS), batch, (*samples, *others), is_list)

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Of the samples, with their types: outputs of other calls are not comparable."""
        return tuple((tuple(each.shape), each.dtype, each.device) for each in self.samples)


def _first(given: Given, names: Sequence[str]) -> Any:
    return next((value for name in names if (value := given[name]) is not None), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


@dataclass(eq=False)
class History:
    """The last outputs of one pass, the latest first."""

    shapes: tuple[Any, ...]
    """Of the samples that they belong to."""
    conditioning: Identity = field(default_factory=lambda: Identity(None))
    structure: Any = None
    """How leaves make up an output."""
    kept: dict[int, list[Any]] = field(default_factory=dict)
    """By the step, the latest first: the tensors of an output, which are copies, and what else is in it, in order."""
    samples: tuple[Tensor, ...] = ()
    """That the last output was computed from, if they are needed."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps whose outputs are kept, the latest first."""
        return tuple(self.kept)

    @property
    def num_bytes(self) -> int:
        leaves = [leaf for each in self.kept.values() for leaf in each if isinstance(leaf, Tensor)]
        return sum(each.nbytes for each in (*leaves, *self.samples))

    def keep(self, step: int, output: Any, seen: Seen, depth: int, keep_samples: bool) -> None:
        """Keep a copy of the output of a computed step, and so many in all."""
        leaves, self.structure = take_apart(output)
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        others = [(each, found) for each, found in self.kept.items() if each != step]
        self.kept = dict([(step, copies), *others][:depth])
        self.samples = tuple(each.detach().clone() for each in seen.samples) if keep_samples else ()

    def predict(self, weights: Sequence[Weights], seen: Seen) -> Any:
        """What the denoiser would return. The weights are for each of the passes that make up the batch, or for all."""
        outputs = list(self.kept.values())
        latest = outputs[0]
        sources, last_sources = pair(latest, seen.samples), pair(latest, self.samples)
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in latest]
        noisy = [(index, source) for index, source in enumerate(sources) if source is not None]
        of_leaves: list[Sequence[Weights]] = [weights] * len(noisy)
        if seen.is_list and len(noisy) % len(weights) == 0:  # each part is some of the samples of the list
            size = len(noisy) // len(weights)
            of_leaves = [weights[number // size : number // size + 1] for number in range(len(noisy))]
        for (index, source), of_leaf in zip(noisy, of_leaves, strict=True):
            _put_sum(leaves[index], of_leaf, [each[index] for each in outputs], source, last_sources[index])
        return _pytree.tree_unflatten(leaves, self.structure)


@dataclass(eq=False)
class Passes:
    """Those of one generation."""

    count: int = 0
    """Over its first step."""
    last_computed: int = -1
    """The last step that was computed."""
    _histories: dict[Hashable, History] = field(default_factory=dict)
    _named: dict[str, int] = field(default_factory=dict)
    """How many passes over this step had that name, less one."""

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._histories.values())

    @property
    def can_predict(self) -> bool:
        return any(map(self.is_latest, self._histories.values()))

    def is_latest(self, history: History) -> bool:
        """Whether its pass came in the last computed step."""
        return history.steps[0] == self.last_computed

    def key_of(self, tick: Tick, name: str | None, *, begins_step: bool) -> Hashable:
        """Which pass a call is: by the pipeline's name for it, or by its place among the passes over the step."""
        if begins_step or tick.pass_index == 0:
            self._named.clear()
        if name is None:
            return tick.pass_index
        number = self._named[name] = self._named.get(name, -1) + 1
        return name, number

    def history(self, key: Hashable, seen: Seen) -> History | None:
        """The outputs of this pass; None if there are none that fit."""
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            return None
        if not history.conditioning.holds(seen.conditioning):
            others = [each for each in self._histories.values() if each.conditioning.holds(seen.conditioning)]
            if others or not history.conditioning.is_gone:
                return None  # passes have changed places
        return history

    def note(self, tick: Tick) -> None:
        self.last_computed = tick.step
        if tick.step == 0:
            self.count = max(self.count, (tick.pass_index + 1) * tick.parts)

    def keep(self, key: Hashable, step: int, output: Any, seen: Seen, needs: tuple[int, bool]) -> History:
        """Keep the output of a computed pass. Returns all that are kept of it."""
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            history = self._histories[key] = History(seen.shapes)
        history.conditioning = Identity(seen.conditioning)
        history.keep(step, output, seen, *needs)
        return history


def take_apart(output: Any) -> tuple[list[Any], Any]:
    """The leaves of an output of any structure, and the structure."""
    leaves, structure = _pytree.tree_flatten(output)
    unknown = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if not unknown:
        return leaves, structure
    for each in unknown:
        _pytree.register_dataclass(each, field_names=[one.name for one in dataclasses.fields(each)])
    return take_apart(output)


def pair(leaves: Sequence[Any], samples: Sequence[Tensor]) -> list[Tensor | None]:
    """For every leaf the sample that it is a prediction for; None if there is none of its shape."""
    left = list(samples)
    found: list[Tensor | None] = []
    for leaf in leaves:
        match = next((each for each in left if _fits(leaf, each)), None)
        if match is not None:
            left = [each for each in left if each is not match]
        found.append(match)
    return found


def _fits(leaf: Any, sample: Tensor) -> bool:
    """Whether shapes are the same, but for the channels: a sample may come with a mask, an output with variances."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.ndim != sample.ndim:
        return False
    return sum(one != other for one, other in zip(leaf.shape, sample.shape, strict=True)) <= 1


def _put_sum(
    result: Tensor, weights: Sequence[Weights], outputs: Sequence[Tensor], sample: Tensor, last_sample: Tensor | None
) -> None:
    """Put the weighted sum into the result, which holds a copy of the latest output."""
    part = trimmed(result, sample)  # variances stay as they were
    sources = [trimmed(output, sample) for output in outputs]
    samples = [None if each is None else trimmed(each, part) for each in (sample, last_sample)]
    count = len(weights) if len(part) % len(weights) == 0 else 1
    for number, of_part in enumerate(weights[:count]):
        rows = slice(number * len(part) // count, (number + 1) * len(part) // count)
        terms = list(zip(of_part.outputs, sources, strict=False))
        terms += [
            (weight, each)
            for weight, each in zip((of_part.sample, of_part.last_sample), samples, strict=True)
            if weight and each is not None
        ]
        if terms[0][0] == 1.0 and len(terms) == 1:
            continue
        total = torch.zeros_like(part[rows], dtype=torch.float32)
        for weight, each in terms:
            total.add_(each[rows], alpha=weight)
        part[rows].copy_(total)


def trimmed(tensor: Tensor, other: Tensor | None) -> Tensor:
    """A view of the channels that the other has too: the first. Masks, given images and variances come after them."""
    if other is not None:
        for dim, (length, wanted) in enumerate(zip(tensor.shape, other.shape, strict=True)):
            if length > wanted:
                return tensor.narrow(dim, 0, wanted)
    return tensor
