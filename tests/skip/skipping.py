"""What tests of skipped steps share: models told their steps, and which steps really run."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from observe import state_of
from tiny import EVERY_FAMILY, Family, output_of
from torch import Tensor, nn

from toma_diffusion import Skip, ToMAConfig, ToMAHandle

BY_NAME = {family.name: family for family in EVERY_FAMILY}


def only_skip(*computed: int, **fields: Any) -> ToMAConfig:
    """These steps are computed, and nothing is merged."""
    return ToMAConfig(ratio=0, skip=Skip(**{"computed": computed, **fields}))


def call(family: Family, model: nn.Module, seed: int = 0, **extra: Any) -> Tensor:
    return output_of(model, family.inputs(seed=seed) | extra)


def generate(
    family: Family, model: nn.Module, handle: ToMAHandle, steps: int, seed: int = 0, **extra: Any
) -> list[Tensor]:
    """The outputs of so many steps, each with an input of its own, told to the handle. `extra` goes to the model."""
    outputs = []
    handle.begin(steps)
    for step in range(steps):
        handle.step(step)
        outputs.append(call(family, model, seed + step, **extra))
    return outputs


def plain(family: Family, steps: int = 4, seed: int = 0, **extra: Any) -> list[Tensor]:
    """The outputs of a model that is left alone."""
    model = family.build()
    return [call(family, model, seed + step, **extra) for step in range(steps)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> list[bool]:
    """Which tensors are the same, bit for bit."""
    return [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]


class Runs:
    """The steps in which a denoiser really runs, in a `with` block: once for every pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.passes: list[int] = []

    @property
    def steps(self) -> list[int]:
        """Without further passes over a step."""
        return list(dict.fromkeys(self.passes))

    def __enter__(self) -> Runs:
        self.hook = self.model.register_forward_hook(lambda *_: self.passes.append(self._step()))
        return self

    def _step(self) -> int:
        last = state_of(self.model)._last_tick
        assert last is not None
        return last.step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.hook.remove()
