"""Counts the calls of a denoiser, and those in which a cache skips blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.families import find_family
from toma_lab.columns.base import Shortcut


class SkippedSteps:
    """In a `with` block, the share of a denoiser's calls in which a block in the middle was not computed.

    It looks at the first projection of that block's attention: caches replace the forward of blocks or of attention,
    which are then called all the same.

    Args:
        block: to look at, if it is another than that in the middle.
    """

    def __init__(self, model: nn.Module, block: nn.Module | None = None) -> None:
        if block is None:
            family = find_family(model)
            blocks = family.blocks(model) if family else []
            if not blocks:
                raise ValueError(f"{type(model).__name__} has no transformer blocks that we know of.")
            block = blocks[len(blocks) // 2].module
        attention = next(child for name, child in block.named_children() if name.startswith("attn"))
        self._projection = next(module for module in attention.modules() if isinstance(module, nn.Linear))
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.calls = 0
        """Of the denoiser."""
        self.computed = 0
        """Those of them in which the block was computed."""

    @classmethod
    def by(cls, shortcuts: Iterable[Shortcut], pipe: Any) -> SkippedSteps:
        """Those that these shortcuts skip in a pipeline."""
        watched = (shortcut.watched(pipe) for shortcut in shortcuts)
        return cls(find_denoisers(pipe)[0], next((block for block in watched if block is not None), None))

    @property
    def share(self) -> float:
        """0 if nothing was skipped."""
        return 1 - self.computed / self.calls if self.calls else 0.0

    def __enter__(self) -> SkippedSteps:
        self._handles = [
            self._model.register_forward_pre_hook(self._count_call),
            self._projection.register_forward_pre_hook(self._count_computed),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _count_call(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    def _count_computed(self, module: nn.Module, args: Any) -> None:
        self.computed += 1


@contextmanager
def counted_calls(pipe: Any) -> Iterator[list[None]]:
    """A list that grows by one with every call for which a denoiser runs. In skipped steps it does not."""
    calls: list[None] = []
    models = find_denoisers(pipe)
    hooks = [model.register_forward_pre_hook(lambda module, given: calls.append(None)) for model in models]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
