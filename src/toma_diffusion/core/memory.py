"""What parts of a model did in the last computed steps, kept to be used again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Remembered:
    """The last changes of one part, and how they changed from step to step. Tensors that are updated in place."""

    def __init__(self, last: list[Tensor], slopes: list[Tensor] | None, ahead: Tensor, per_step: Tensor) -> None:
        self.last = last
        """In the last computed step."""
        self.slopes = slopes
        """How much they changed in a step, on average between the last two computed ones; None without lines."""
        self.ahead = ahead
        self.per_step = per_step

    def store(self, changes: Sequence[Tensor]) -> None:
        """Remember what the part did in this step. Gradients are not: they would lead back into this step."""
        for index, change in enumerate(each.detach() for each in changes):
            last = self.last[index]
            if self.slopes is not None:
                self.slopes[index].copy_((change - last) * self.per_step)
            last.copy_(change)

    def recall(self) -> list[Tensor]:
        """What to expect of the part in this step: as it was, or continued in a line."""
        if self.slopes is None:
            return self.last
        return [last + self.ahead.to(last.dtype) * slope for last, slope in zip(self.last, self.slopes, strict=True)]


class Memory:
    """The changes of all parts of a model, in one pass over a step.

    The tensors are allocated once and updated in place, so that compiled code and CUDA graphs can use them. What
    depends on the step is in scalars on the device, set before a call: no value is part of compiled code.

    Args:
        shapes: of what each part remembers, one or more tensors a part.
        lines: whether how changes change from step to step is remembered too.
        dtype: of the changes; use that of the tokens.
        device: that of the tokens.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[tuple[int, ...]]],
        *,
        lines: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.order = 1.0
        """How far lines are followed, from 0 to 1. May be set before every call."""
        self.ahead = torch.zeros((), device=device)
        """Steps since the last computed one, times `order`."""
        self.per_step = torch.zeros((), device=device)
        """One over the number of steps between the last computed one and the one before it; 0 if there is none."""
        self.parts = []
        for of_part in shapes:
            last = [torch.zeros(shape, dtype=dtype, device=device) for shape in of_part]
            slopes = [torch.zeros_like(change) for change in last] if lines else None
            self.parts.append(Remembered(last, slopes, self.ahead, self.per_step))
        self.step: int | None = None
        """The last computed step; None if there is none in this generation."""

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors; their addresses never change."""
        changes = [change for part in self.parts for change in (*part.last, *(part.slopes or ()))]
        return [*changes, self.ahead, self.per_step]

    def forget(self) -> None:
        """A new generation begins. Changes are set to 0: what is not finite would otherwise stay in the slopes."""
        if self.step is not None:
            self.step = None
            for buffer in self.buffers:
                buffer.zero_()

    def compute(self, step: int) -> None:
        """Set the scalars for a step whose changes are going to be stored."""
        if self.step != step:
            self.per_step.fill_(0.0 if self.step is None else 1 / (step - self.step))
            self.step = step

    def reuse(self, step: int) -> None:
        """Set the scalars for a step that reuses."""
        if self.step is None:
            raise RuntimeError(f"step {step} has nothing to reuse: no step of this generation was computed.")
        self.ahead.fill_(self.order * (step - self.step))
