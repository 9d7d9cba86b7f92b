"""Model families, one a file. The first that matches a model is used; registered ones come before ours.

Everything that a family needs can be imported from here. See docs/support-a-new-model.md.
"""

from __future__ import annotations

from torch import nn

from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.errors import UsageError
from toma_diffusion.families.aura_flow import AuraFlow
from toma_diffusion.families.base import (
    Family,
    Stack,
    adds_residuals,
    around,
)
from toma_diffusion.families.builders import cross_block, joint_block, sequence_block, single_block, site, unet_block
from toma_diffusion.families.chroma import Chroma
from toma_diffusion.families.cogvideox import CogVideoX
from toma_diffusion.families.flux import Flux
from toma_diffusion.families.flux2 import Flux2
from toma_diffusion.families.flux3 import Flux3
from toma_diffusion.families.grids import (
    grid_from_ids,
    grid_from_shapes,
    grid_of_patches,
    video_from_ids,
    without_first_frame,
)
from toma_diffusion.families.hunyuan_video import HunyuanVideo
from toma_diffusion.families.hunyuan_video15 import HunyuanVideo15
from toma_diffusion.families.krea2 import Krea2
from toma_diffusion.families.ltx2 import LTX2
from toma_diffusion.families.minimax_h3 import MiniMaxH3
from toma_diffusion.families.mochi import Mochi
from toma_diffusion.families.modulation import Before, from_table, modulating_norm, plain_norm, shift_and_scale
from toma_diffusion.families.pixart import PixArt
from toma_diffusion.families.qwen_image import QwenImage
from toma_diffusion.families.qwen_image21 import QwenImage21
from toma_diffusion.families.refused import reason_to_refuse
from toma_diffusion.families.sd3 import SD3
from toma_diffusion.families.unet import UNet
from toma_diffusion.families.wan import Wan
from toma_diffusion.families.z_image import ZImage
from toma_diffusion.merge import Grid
from toma_diffusion.merge.block import Block, SiteSpec
from toma_diffusion.merge.sites import GatherRows, MergeInput, MergeOutput, PerToken, Site, UnmergeOutput
from toma_diffusion.merge.state import Call

__all__ = [
    "Arguments",
    "Before",
    "Block",
    "Call",
    "Family",
    "GatherRows",
    "Given",
    "Grid",
    "Hook",
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
    "cross_block",
    "find_family",
    "from_table",
    "grid_from_ids",
    "grid_from_shapes",
    "grid_of_patches",
    "joint_block",
    "modulating_norm",
    "plain_norm",
    "register_family",
    "sequence_block",
    "shift_and_scale",
    "single_block",
    "site",
    "unet_block",
    "unsupported",
    "video_from_ids",
    "without_first_frame",
]

FAMILIES: list[type[Family]] = [
    UNet,
    Flux,
    SD3,
    PixArt,
    Flux2,
    Flux3,
    QwenImage,
    QwenImage21,
    ZImage,
    Krea2,
    Chroma,
    AuraFlow,
    Wan,
    LTX2,
    MiniMaxH3,
    HunyuanVideo15,
    HunyuanVideo,
    CogVideoX,
    Mochi,
]


def register_family(family: type[Family]) -> type[Family]:
    """Add support for a model family; usable as a class decorator. See docs/support-a-new-model.md."""
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise UsageError(f"{family!r} is not a subclass of toma_diffusion.families.Family.")
    FAMILIES.insert(0, family)
    return family


def find_family(model: nn.Module) -> Family | None:
    return next((found for family in FAMILIES if (found := family()).matches(model)), None)


def unsupported(model: nn.Module) -> UsageError:
    """The error to raise for a model of another family."""
    reason = reason_to_refuse(model)
    why = f": {reason}" if reason else ""
    supported = "; ".join(family.supports for family in FAMILIES)
    return UsageError(f"{type(model).__name__} is not supported{why}. Supported are: {supported}.")
