"""Other token mergers, behind the same call, so that they can be compared: ToMeSD, ToFu, ToDo. One a file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.baselines.base import BaselineConfig
from toma_diffusion.baselines.todo import ToDoConfig
from toma_diffusion.baselines.tofu import ToFuConfig
from toma_diffusion.baselines.tomesd import ToMeSDConfig
from toma_diffusion.config import PRESETS, Config, ToMAConfig, check_one_of

__all__ = ["METHODS", "BaselineConfig", "ToDoConfig", "ToFuConfig", "ToMeSDConfig", "named_config"]

METHODS: Mapping[str, type[BaselineConfig]] = MappingProxyType(
    {"tomesd": ToMeSDConfig, "tofu": ToFuConfig, "todo": ToDoConfig}
)
"""The other methods by name."""


def named_config(name: str, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a preset of ToMA, or of another method, with single fields replaced."""
    if name in METHODS:
        return METHODS[name].from_dict(overrides)
    check_one_of("preset", name, (*PRESETS, *METHODS))
    return ToMAConfig.from_preset(name, **overrides)
