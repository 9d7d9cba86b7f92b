"""Model families. The first adapter that matches a model is used; registered ones come before ours.

Everything that an adapter needs can be imported from here. See docs/support-a-new-model.md.
"""

from __future__ import annotations

from torch import nn

from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.families.aura_flow import AuraFlowAdapter
from toma_diffusion.families.base import (
    Adapter,
    AfterModulatingNorm,
    Before,
    Block,
    SiteSpec,
    Stack,
    adds_residuals,
    around,
    leave_first,
)
from toma_diffusion.families.basic_block import describe_block
from toma_diffusion.families.chroma import ChromaAdapter
from toma_diffusion.families.cogvideox import CogVideoXAdapter
from toma_diffusion.families.flux import FluxAdapter
from toma_diffusion.families.flux2 import Flux2Adapter
from toma_diffusion.families.flux3 import Flux3Adapter
from toma_diffusion.families.frames import grid_of_patches, without_first_frame
from toma_diffusion.families.hunyuan_video import HunyuanVideoAdapter
from toma_diffusion.families.hunyuan_video15 import HunyuanVideo15Adapter
from toma_diffusion.families.ids import IdReader, grid_from_ids, video_from_ids
from toma_diffusion.families.krea2 import Krea2Adapter
from toma_diffusion.families.ltx2 import LTX2Adapter
from toma_diffusion.families.minimax_h3 import MiniMaxH3Adapter
from toma_diffusion.families.mochi import MochiAdapter
from toma_diffusion.families.pixart import PixArtAdapter
from toma_diffusion.families.qwen_image import QwenImageAdapter
from toma_diffusion.families.qwen_image21 import QwenImage21Adapter
from toma_diffusion.families.refused import reason_to_refuse
from toma_diffusion.families.sd3 import SD3Adapter
from toma_diffusion.families.unet import UNetAdapter
from toma_diffusion.families.wan import WanAdapter
from toma_diffusion.families.z_image import ZImageAdapter
from toma_diffusion.merge import Grid
from toma_diffusion.merge.sites import GatherRows, KeyBias, MergeInput, MergeOutput, PerToken, Site, UnmergeOutput
from toma_diffusion.merge.state import Call

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
    "PerToken",
    "Site",
    "SiteSpec",
    "Stack",
    "UnmergeOutput",
    "adds_residuals",
    "around",
    "describe_block",
    "find_adapter",
    "grid_from_ids",
    "grid_of_patches",
    "leave_first",
    "register_adapter",
    "supported",
    "unsupported",
    "video_from_ids",
    "without_first_frame",
]

_ADAPTERS: list[type[Adapter]] = [
    UNetAdapter,
    FluxAdapter,
    SD3Adapter,
    PixArtAdapter,
    Flux2Adapter,
    Flux3Adapter,
    QwenImageAdapter,
    QwenImage21Adapter,
    ZImageAdapter,
    Krea2Adapter,
    ChromaAdapter,
    AuraFlowAdapter,
    WanAdapter,
    LTX2Adapter,
    MiniMaxH3Adapter,
    HunyuanVideo15Adapter,
    HunyuanVideoAdapter,
    CogVideoXAdapter,
    MochiAdapter,
]


def register_adapter(adapter: type[Adapter]) -> type[Adapter]:
    """Add support for a model family; usable as a class decorator. See docs/support-a-new-model.md."""
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise UsageError(f"{adapter!r} is not a subclass of toma_diffusion.families.Adapter.")
    _ADAPTERS.insert(0, adapter)
    return adapter


def find_adapter(model: nn.Module) -> Adapter | None:
    """A new adapter for `model`, or None if its family is not supported."""
    for candidate in _ADAPTERS:
        adapter = candidate()
        if adapter.matches(model):
            return adapter
    return None


def unsupported(model: nn.Module) -> UsageError:
    """The error to raise for a model of another family."""
    reason = reason_to_refuse(model)
    why = f": {reason}" if reason else ""
    return UsageError(f"{type(model).__name__} is not supported{why}. Supported are: {supported()}.")


def supported() -> str:
    """The supported families, for error messages."""
    return "; ".join(adapter.supports for adapter in _ADAPTERS)
