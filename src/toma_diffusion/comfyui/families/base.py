"""What the adapters for ComfyUI's own model code share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families import Family

Options = Mapping[str, Any]
"""ComfyUI's `transformer_options` of a call."""


class ComfyAdapter(Family):
    """An adapter for a class of ComfyUI. It is known by the names of the class and its module: nothing is imported."""

    module_name: ClassVar[str]
    """The module of ComfyUI in which the class is. Subclasses of the class are other models, and do not match."""

    def matches(self, model: nn.Module) -> bool:
        """Whether `model` is of this class."""
        kind = type(model)
        return kind.__name__ == self.model_class and kind.__module__ == self.module_name


def transformer_options(given: Given) -> Options:
    """The options of a call of a model."""
    options: Options = given["transformer_options"] or {}
    return options


def patches(given: Given, *names: str) -> list[str]:
    """Which of these patches other nodes have put into the model."""
    found = transformer_options(given).get("patches") or {}
    return [name for name in names if found.get(name)]


def replaced_blocks(given: Given) -> str | None:
    """The reason not to rely on every block being run, if nodes have replaced blocks, as skip-layer guidance does."""
    replaced = (transformer_options(given).get("patches_replace") or {}).get("dit")
    return "other nodes replace blocks of the model" if replaced else None


def rounded_up(size: int, patch: int) -> int:
    """How many patches cover that many pixels of a latent."""
    return -(-size // patch)
