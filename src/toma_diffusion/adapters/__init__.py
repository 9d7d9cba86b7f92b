"""Model families. The first adapter that matches a model serves it; your own come before ours."""

from __future__ import annotations

from torch import nn

from toma_diffusion.adapters.base import Adapter, Block, SiteSpec
from toma_diffusion.adapters.flux import FluxAdapter
from toma_diffusion.adapters.pixart import PixArtAdapter
from toma_diffusion.adapters.sd3 import SD3Adapter
from toma_diffusion.adapters.unet import UNetAdapter

__all__ = ["Adapter", "Block", "SiteSpec", "find_adapter", "register_adapter", "supported"]

_ADAPTERS: list[type[Adapter]] = [UNetAdapter, FluxAdapter, SD3Adapter, PixArtAdapter]


def register_adapter(adapter: type[Adapter]) -> type[Adapter]:
    """Add support for a model family; usable as a class decorator. See docs/support-a-new-model.md."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise ValueError(f"{adapter!r} is not a subclass of toma_diffusion.adapters.Adapter.")
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
