"""The model families of ComfyUI in which tokens can be merged, one per file. ComfyUI itself is never imported here."""

from __future__ import annotations

from torch import nn

from toma_diffusion.comfyui.families.base import ComfyAdapter
from toma_diffusion.comfyui.families.flux import FluxAdapter
from toma_diffusion.comfyui.families.qwen_image import QwenImageAdapter
from toma_diffusion.comfyui.families.unet import UNetAdapter
from toma_diffusion.comfyui.families.wan import WanAdapter

__all__ = ["ComfyAdapter", "find_comfy_adapter", "reason_to_refuse"]

_ADAPTERS: tuple[type[ComfyAdapter], ...] = (UNetAdapter, FluxAdapter, QwenImageAdapter, WanAdapter)


def find_comfy_adapter(model: nn.Module) -> ComfyAdapter | None:
    """A new adapter for a model of ComfyUI, or None if its family is not supported."""
    return next((adapter() for adapter in _ADAPTERS if adapter().matches(model)), None)


def reason_to_refuse(model: nn.Module) -> str:
    """Why no tokens are merged in a model without an adapter."""
    supported = "; ".join(adapter.supports for adapter in _ADAPTERS)
    return f"tokens of {type(model).__name__} cannot be merged, only those of: {supported}"
