"""UNet2DConditionModel: Stable Diffusion 1.x and 2.x, SDXL base, refiner and turbo, their inpainting models."""

from __future__ import annotations

from typing import Any

from torch import nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.families.base import Family
from toma_diffusion.families.builders import unet_block
from toma_diffusion.families.modulation import plain_norm
from toma_diffusion.families.refused import REFUSED
from toma_diffusion.merge import Grid
from toma_diffusion.merge.block import Block
from toma_diffusion.merge.state import Call


class UNet(Family):
    """Every `Transformer2DModel` of the UNet is a stage; those of one level are of one kind."""

    model_class = "UNet2DConditionModel"
    supports = "UNet2DConditionModel (Stable Diffusion 1.x, 2.x, SDXL)"

    def matches(self, model: nn.Module) -> bool:
        """Leaves out a subclass with other blocks."""
        return super().matches(model) and type(model).__name__ not in REFUSED

    def blocks(self, model: Any) -> list[Block]:
        build, levels = unet_block(plain_norm("norm1")), len(model.down_blocks)
        places = [(f"down_blocks.{index}", block, index) for index, block in enumerate(model.down_blocks)]
        places.append(("mid_block", model.mid_block, levels if model.down_blocks[-1].downsamplers else levels - 1))
        places += [(f"up_blocks.{index}", block, levels - 1 - index) for index, block in enumerate(model.up_blocks)]
        return [
            build(block, f"{stage}.transformer_blocks.{number}", f"level {level}", stage=stage, level=level)
            for place, parent, level in places
            for stage, transformer in _named(f"{place}.attentions", getattr(parent, "attentions", None) or ())
            for number, block in enumerate(getattr(transformer, "transformer_blocks", ()))
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is halved from level to level, rounded as the downsampling convolution rounds it."""
        sample = given["sample"]
        height, width = sample.shape[-2:]
        grids = {"level 0": Grid(height, width)}
        rounding_up = 1 if model.config.downsample_padding else 0
        for level, block in enumerate(model.down_blocks, start=1):
            if block.downsamplers:
                height, width = (height + rounding_up) // 2, (width + rounding_up) // 2
            grids[f"level {level}"] = Grid(height, width)
        masked = (given["cross_attention_kwargs"] or {}).get("ip_adapter_masks") is not None
        left_whole = "IP-Adapter masks are laid over whole grids" if masked else None
        return self.call(model, given, sample=sample, grids=grids, blocks_left_whole=left_whole)


def _named(place: str, modules: Any) -> list[tuple[str, Any]]:
    return [(f"{place}.{index}", module) for index, module in enumerate(modules)]
