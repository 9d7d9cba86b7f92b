"""UNetModel of ComfyUI: Stable Diffusion 1.x and 2.x, SDXL and its refiner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from toma_diffusion.comfyui.families.base import ComfyFamily, patches, transformer_options
from toma_diffusion.families import Block, Call, Given, Grid, plain_norm, site

TRANSFORMER, DOWN, UP = "SpatialTransformer", "Downsample", "Upsample"
TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")
"""Patches of other nodes that work on the tokens inside a block."""
SIZE_PATCHES = ("input_block_patch", "input_block_patch_after_skip")
"""Patches that may change the size of the picture between levels, as deep shrink does."""


class UNet(ComfyFamily):
    """Every `SpatialTransformer` is a stage; those of one level are of one kind."""

    model_class = "UNetModel"
    module_name = "comfy.ldm.modules.diffusionmodules.openaimodel"
    supports = "UNetModel (Stable Diffusion 1.x, 2.x, SDXL)"

    def matches(self, model: Any) -> bool:
        """Not if it makes videos: those have other transformers."""
        return super().matches(model) and any(_is(layer, TRANSFORMER) for layer in model.modules())

    def blocks(self, model: Any) -> list[Block]:
        return [
            _block(block, f"{name}.transformer_blocks.{number}", name, level)
            for name, layer, level in _layers(model)
            if _is(layer, TRANSFORMER)
            for number, block in enumerate(layer.transformer_blocks)
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is halved from level to level, rounded up by a convolution and down by pooling."""
        height, width = given["x"].shape[-2:]
        grids = {"level 0": Grid(height, width)}
        downsamplers = [layer for _, layer, _ in _layers(model) if _is(layer, DOWN)]
        for level, layer in enumerate(downsamplers, start=1):
            rounding_up = 1 if layer.use_conv else 0
            height, width = (height + rounding_up) // 2, (width + rounding_up) // 2
            grids[f"level {level}"] = Grid(height, width)
        replaced = transformer_options(given).get("patches_replace") or {}
        needs_all = patches(given, *TOKEN_PATCHES) or [name for name in ("attn1", "attn2") if replaced.get(name)]
        patched = f"other nodes patch its blocks ({', '.join(needs_all)})"
        resizes = patches(given, *SIZE_PATCHES)
        resized = f"another node may resize the picture inside the model ({', '.join(resizes)})"
        return self.call(
            model,
            given,
            timestep=given["timesteps"],
            grids=grids,
            blocks_left_whole=patched if needs_all else None,
            left_whole=resized if resizes else None,
        )


def _layers(model: Any) -> Iterator[tuple[str, Any, int]]:
    """The name, the module and the level of every layer, in the order in which they run."""
    parts = [(f"input_blocks.{index}", block) for index, block in enumerate(model.input_blocks)]
    parts.append(("middle_block", model.middle_block or ()))
    parts += [(f"output_blocks.{index}", block) for index, block in enumerate(model.output_blocks)]
    level = 0
    for name, block in parts:
        for number, layer in enumerate(block):
            level -= _is(layer, UP)
            yield f"{name}.{number}", layer, level
            level += _is(layer, DOWN)


def _block(module: Any, name: str, stage: str, level: int) -> Block:
    # Self-attention gets keys, or values of their own, only from patches of other nodes, which may need all tokens.
    is_patched = _gets_value if module.disable_self_attn else _gets_keys
    crossing = () if module.attn2 is None else (site("cross_attn", "attn2", leave_whole=_gets_value),)
    return Block(
        name=name,
        module=module,
        kind=f"level {level}",
        stage=stage,
        width=module.n_heads * module.d_head,
        sites=(site("attn", "attn1", leave_whole=is_patched), *crossing, site("ff", "ff")),
        normalize=plain_norm("norm1"),
        level=level,
    )


def _gets_keys(given: Given) -> bool:
    return given["context"] is not None


def _gets_value(given: Given) -> bool:
    return given["value"] is not None


def _is(layer: nn.Module, name: str) -> bool:
    return type(layer).__name__ == name
