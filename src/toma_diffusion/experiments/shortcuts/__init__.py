"""Ways to save time other than merging tokens, to compare it with and to combine it with. One a file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.experiments.parsing import parse_settings, parse_value
from toma_diffusion.experiments.shortcuts.base import Shortcut
from toma_diffusion.experiments.shortcuts.block_caches import FirstBlockCache, MagCache, TaylorSeer
from toma_diffusion.experiments.shortcuts.deepcache import DeepCache
from toma_diffusion.experiments.shortcuts.fewer_steps import FewerSteps

__all__ = ["SHORTCUTS", "FewerSteps", "Shortcut", "parse_shortcut", "shortcut_from_dict"]

_KINDS: tuple[type[Shortcut], ...] = (FewerSteps, FirstBlockCache, TaylorSeer, MagCache, DeepCache)
SHORTCUTS: Mapping[str, type[Shortcut]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""By the name that a user writes."""


def parse_shortcut(text: str) -> Shortcut:
    """`steps:14`, or `first-block-cache:threshold=0.1`."""
    name, _, changes = text.strip().partition(":")
    if name == FewerSteps.name:
        if not changes:
            raise UsageError(f"method {text!r} does not say how many: write steps:14.")
        return FewerSteps.from_settings({"steps": parse_value(changes)})
    return SHORTCUTS[name].from_settings(parse_settings(text, changes))


def shortcut_from_dict(values: Mapping[str, Any]) -> Shortcut:
    """The inverse of `to_dict`."""
    return SHORTCUTS[values["name"]].from_settings(values["settings"])
