"""What the families of ComfyUI's own model code share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from toma_diffusion.families import Block, Call, Family, Given, Grid

Options = Mapping[str, Any]
"""ComfyUI's `transformer_options` of a call."""


class ComfyFamily(Family):
    """A class of ComfyUI. It is known by the names of the class and its module: ComfyUI is not imported."""

    module_name: ClassVar[str]
    """The module of ComfyUI in which the class is. Subclasses of the class are other models, and do not match."""

    def matches(self, model: nn.Module) -> bool:
        kind = type(model)
        return kind.__name__ == self.model_class and kind.__module__ == self.module_name

    def call(self, model: nn.Module, given: Given, grid: Grid | None = None, **facts: Any) -> Call:
        return super().call(model, given, grid, **{"sample": given["x"], "conditioning": given["context"]} | facts)


def block_builder(width: str, **facts: Any) -> Callable[[Any, str, str], Block]:
    """For a `Stack`: makes a `Block` of a module, its name and its kind.

    `width` is the attribute of the module that holds the channels of its tokens; all blocks of the stack have the
    `facts` in common.
    """
    return lambda module, name, kind: Block(name=name, module=module, kind=kind, width=getattr(module, width), **facts)


def transformer_options(given: Given) -> Options:
    options: Options = given["transformer_options"] or {}
    return options


def patches(given: Given, *names: str) -> list[str]:
    """Which of these patches other nodes have put into the model."""
    found = transformer_options(given).get("patches") or {}
    return [name for name in names if found.get(name)]


def replaced_blocks(given: Given) -> str | None:
    """Why not every block may run, if nodes have replaced blocks, as skip-layer guidance does."""
    replaced = (transformer_options(given).get("patches_replace") or {}).get("dit")
    return "other nodes replace blocks of the model" if replaced else None


def rounded_up(size: int, patch: int) -> int:
    """How many patches cover that many pixels of a latent."""
    return -(-size // patch)
