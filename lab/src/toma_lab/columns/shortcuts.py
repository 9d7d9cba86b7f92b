"""All shortcuts by their names, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.errors import UsageError
from toma_lab.columns.base import Shortcut
from toma_lab.columns.block_caches import FirstBlockCache, MagCache, SeaCache, TaylorSeer
from toma_lab.columns.cache_dit import CacheDiT
from toma_lab.columns.deepcache import DeepCache
from toma_lab.columns.solver import Solver
from toma_lab.columns.steps import FewerSteps, Timesteps
from toma_lab.parsing import parse_settings, parse_value

_KINDS: tuple[type[Shortcut], ...] = (
    *(FewerSteps, Timesteps, Solver),
    *(FirstBlockCache, TaylorSeer, MagCache, SeaCache, CacheDiT, DeepCache),
)
SHORTCUTS: Mapping[str, type[Shortcut]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""By the name that a user writes."""


def shortcut_class(text: str) -> type[Shortcut] | None:
    """The shortcut that a user means, with or without hyphens; None if it is something else."""
    name = text.partition(":")[0].strip().replace("-", "").lower()
    return next((kind for kind in _KINDS if kind.name.replace("-", "") == name), None)


def parse_shortcut(text: str) -> Shortcut:
    """`steps:14`, `first-block-cache:threshold=0.1`, or in short `firstblockcache:0.1`."""
    kind = shortcut_class(text)
    if kind is None:
        raise UsageError(f"{text!r} is no shortcut: use one of {', '.join(SHORTCUTS)}.")
    changes = text.strip().partition(":")[2].strip()
    if changes and "=" not in changes:
        return kind.from_settings({kind.knob: parse_value(changes)})
    return kind.from_settings(parse_settings(text, changes))


def shortcut_from_dict(values: Mapping[str, Any]) -> Shortcut:
    """The inverse of `to_dict`."""
    return SHORTCUTS[values["name"]].from_settings(values["settings"])
