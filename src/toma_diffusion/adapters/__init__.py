"""Model families. The first adapter that matches a model is used; registered ones come before ours.

Everything that an adapter needs can be imported from here. See docs/support-a-new-model.md.
"""

from __future__ import annotations

from torch import nn

from toma_diffusion.adapters.base import (
    Adapter,
    AfterModulatingNorm,
    Before,
    Block,
    SiteSpec,
    adds_residuals,
    around,
    first_share,
    part_of,
)
from toma_diffusion.adapters.basic_block import describe_block
from toma_diffusion.adapters.flux import FluxAdapter
from toma_diffusion.adapters.ids import IdReader, grid_from_ids
from toma_diffusion.adapters.pixart import PixArtAdapter
from toma_diffusion.adapters.sd3 import SD3Adapter
from toma_diffusion.adapters.unet import UNetAdapter
from toma_diffusion.core import Grid
from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.arguments import Arguments, Given, Keywords
from toma_diffusion.hooks.reuse import Part, PassOn, Stream
from toma_diffusion.hooks.sites import (
    GatherRows,
    Hook,
    KeyBias,
    MergeInput,
    MergeOutput,
    PerToken,
    Site,
    UnmergeOutput,
)
from toma_diffusion.hooks.state import Call

__all__ = [
    "Adapter",
    "AfterModulatingNorm",
    "Arguments",
    "Before",
    "Block",
    "Call",
    "GatherRows",
    "Given",
    "Grid",
    "Hook",
    "IdReader",
    "KeyBias",
    "Keywords",
    "MergeInput",
    "MergeOutput",
    "Part",
    "PassOn",
    "PerToken",
    "Site",
    "SiteSpec",
    "Stream",
    "UnmergeOutput",
    "adds_residuals",
    "around",
    "describe_block",
    "find_adapter",
    "first_share",
    "grid_from_ids",
    "part_of",
    "register_adapter",
    "supported",
]

_ADAPTERS: list[type[Adapter]] = [UNetAdapter, FluxAdapter, SD3Adapter, PixArtAdapter]


def register_adapter(adapter: type[Adapter]) -> type[Adapter]:
    """Add support for a model family; usable as a class decorator. See docs/support-a-new-model.md."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise UsageError(f"{adapter!r} is not a subclass of toma_diffusion.adapters.Adapter.")
    _ADAPTERS.insert(0, adapter)
    return adapter


def find_adapter(model: nn.Module) -> Adapter | None:
    """A new adapter for `model`, or None if its family is not supported."""
    for candidate in _ADAPTERS:
        adapter = candidate()
        if adapter.matches(model):
            return adapter
    return None


def supported() -> str:
    """The supported families, for error messages."""
    return "; ".join(adapter.supports for adapter in _ADAPTERS)
