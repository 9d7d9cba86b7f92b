"""What tests of skipped steps share: models whose steps are given, and which steps really run."""

from __future__ import annotations

from typing import Any

import torch
from tiny import EVERY_FAMILY, Family, output_of
from torch import Tensor, nn

from toma_diffusion import Handle, Skip, speed_up
from toma_diffusion.engine.install import find_root

BY_NAME = {family.name: family for family in EVERY_FAMILY}
FOLLOWED = (0, 0, 2, 2)
"""Which step's output each of four steps returns, if the first and the third are computed."""


def skipping(pipe: Any, *computed: int) -> Handle:
    """These steps are computed, and nothing is merged."""
    return speed_up(pipe, skip=Skip(computed=computed))


def counts(handle: Handle) -> tuple[int, int]:
    """How many steps of the last generation were computed, and how many predicted."""
    skip = handle.summary().skip
    assert skip is not None
    return skip.num_computed, skip.num_predicted


def call(family: Family, model: nn.Module, seed: int = 0, **extra: Any) -> Tensor:
    return output_of(model, family.inputs(seed=seed) | extra)


def generate(
    family: Family, model: nn.Module, handle: Handle, steps: int = 4, seed: int = 0, **extra: Any
) -> list[Tensor]:
    """The outputs of so many steps, each with an input of its own. `extra` goes to the model."""
    outputs = []
    handle.begin(steps)
    for step in range(steps):
        handle.step(step)
        outputs.append(call(family, model, seed + step, **extra))
    return outputs


def plain(family: Family, steps: int = 4, seed: int = 0) -> list[Tensor]:
    """The outputs of a model that is left alone."""
    model = family.build()
    return [call(family, model, seed + step) for step in range(steps)]


def followed(family: Family, seed: int = 0) -> list[Tensor]:
    """What four steps return if the first and the third are computed."""
    whole = plain(family, seed=seed)
    return [whole[step] for step in FOLLOWED]


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
        root = find_root(self.model)
        assert root is not None
        assert root.session.tick is not None
        return root.session.tick.step

    def __exit__(self, *_: object) -> None:
        self.hook.remove()
