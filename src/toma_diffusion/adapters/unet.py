"""UNet2DConditionModel: Stable Diffusion 1.x and 2.x, SDXL base, refiner and turbo, their inpainting models."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from toma_diffusion.adapters.base import Adapter, Block, part_of
from toma_diffusion.adapters.basic_block import describe_block
from toma_diffusion.core import Grid
from toma_diffusion.hooks.arguments import Given
from toma_diffusion.hooks.reuse import Part, PassOn, Stream
from toma_diffusion.hooks.state import Call


class UNetAdapter(Adapter):
    """Every `Transformer2DModel` of the UNet is a run; those of one level are of one kind."""

    model_class = "UNet2DConditionModel"
    supports = "UNet2DConditionModel (Stable Diffusion 1.x, 2.x, SDXL)"

    def blocks(self, model: Any) -> list[Block]:
        """All BasicTransformerBlocks: down, middle, up."""
        levels = len(model.down_blocks)
        places = [(f"down_blocks.{index}", block, index) for index, block in enumerate(model.down_blocks)]
        places.append(("mid_block", model.mid_block, levels if model.down_blocks[-1].downsamplers else levels - 1))
        places += [(f"up_blocks.{index}", block, levels - 1 - index) for index, block in enumerate(model.up_blocks)]
        return [
            describe_block(
                block,
                name=f"{place}.attentions.{index}.transformer_blocks.{number}",
                kind=f"level {level}",
                run=f"{place}.attentions.{index}",
                level=level,
            )
            for place, parent, level in places
            for index, transformer in enumerate(getattr(parent, "attentions", None) or ())
            for number, block in enumerate(getattr(transformer, "transformer_blocks", ()))
        ]

    def parts(self, model: Any, deep: bool) -> list[Part]:
        """The transformer blocks of every `Transformer2DModel`. With `deep`, everything below the first level is one
        part."""
        below = below_first_level(model) if deep else None
        if below is None:
            return super().parts(model, deep)
        above = [block for block in self.blocks(model) if not any(_contains(each, block) for each in below.modules)]
        return [*(part_of(list(blocks)) for _, blocks in groupby(above, key=lambda block: block.run)), below]

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
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids=grids,
            blocks_left_alone="IP-Adapter masks are laid over whole grids" if masked else None,
        )


def below_first_level(model: Any) -> Part | None:
    """All modules of a UNet but the first level's: of the way down, the middle, of the way up. None if there is no
    second level, or if its blocks are of another kind."""
    first, *down = model.down_blocks
    up = list(model.up_blocks)[:-1]
    middle = [] if model.mid_block is None else [model.mid_block]
    if not down or not first.downsamplers or not up[-1].upsamplers or not all(_is_plain(block) for block in down):
        return None
    rounding_up = 1 if model.config.downsample_padding else 0
    return Part(
        name="below level 0",
        modules=(*down, *middle, *up),
        stand_ins=(*(SkipDown(rounding_up) for _ in down), *(PassOn() for _ in (*middle, *up))),
        streams=(Stream(LatentShape(up[-1].resnets[-1].out_channels)),),
    )


def _is_plain(block: Any) -> bool:
    return bool(getattr(block, "resnets", None)) and hasattr(block, "downsamplers")


def _contains(module: nn.Module, block: Block) -> bool:
    return any(each is block.module for each in module.modules())


@dataclass(frozen=True)
class LatentShape:
    """The shape of the first level, with so many channels."""

    channels: int

    def __call__(self, call: Call) -> tuple[int, ...]:
        """In that call."""
        batch, _, height, width = call.sample.shape
        return batch, self.channels, height, width


@dataclass(frozen=True)
class SkipDown:
    """What a block on the way down returns if it does not run: zeros in the shapes of its results.

    Only skipped blocks read them, and a ControlNet, which adds to them.
    """

    rounding_up: int

    def __call__(self, module: Any, given: Given) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tokens, and what goes over to the way up."""
        tokens = given.tokens
        height, width = tokens.shape[-2:]
        channels = module.resnets[-1].out_channels
        shapes = [(tokens.shape[0], channels, height, width)] * len(module.resnets)
        if module.downsamplers:
            halves = ((side + self.rounding_up) // 2 for side in (height, width))
            shapes.append((tokens.shape[0], channels, *halves))
        zero = tokens.new_zeros(())
        return tokens.new_zeros(shapes[-1]), tuple(zero.expand(shape) for shape in shapes)
