"""The model families of ComfyUI in which tokens can be merged, one a file. ComfyUI itself is never imported here."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.comfyui.families.base import ComfyFamily
from toma_diffusion.comfyui.families.flux import Flux
from toma_diffusion.comfyui.families.qwen_image import QwenImage
from toma_diffusion.comfyui.families.unet import UNet
from toma_diffusion.comfyui.families.wan import Wan
from toma_diffusion.families import Call, Given

__all__ = ["ComfyFamily", "find_comfy_family"]

FAMILIES: tuple[type[ComfyFamily], ...] = (UNet, Flux, QwenImage, Wan)


class Other(ComfyFamily):
    """Any other model: its steps can be skipped, its tokens cannot be merged."""

    def obstacle(self, model: nn.Module) -> str:
        supported = "; ".join(family.supports for family in FAMILIES)
        return f"tokens of {type(model).__name__} cannot be merged, only those of: {supported}"

    def read_call(self, model: Any, given: Given) -> Call:
        raise NotImplementedError  # asked only where tokens are merged


def find_comfy_family(model: nn.Module) -> ComfyFamily:
    return next((found for family in FAMILIES if (found := family()).matches(model)), Other())
