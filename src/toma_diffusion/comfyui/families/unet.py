"""UNetModel of ComfyUI: Stable Diffusion 1.x and 2.x, SDXL and its refiner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from toma_diffusion.comfyui.families.base import ComfyAdapter, patches, transformer_options
from toma_diffusion.engine.arguments import Given
from toma_diffusion.families import Call, Grid, around
from toma_diffusion.merge.block import Block, SiteSpec

TRANSFORMER = "SpatialTransformer"
TOKEN_PATCHES = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")
"""Patches of other nodes that work on the tokens inside a block."""
SIZE_PATCHES = ("input_block_patch", "input_block_patch_after_skip")
"""Patches that may change the size of the picture between levels, as deep shrink does."""


class UNetAdapter(ComfyAdapter):
    """Every `SpatialTransformer` is a run; those of one level are of one kind."""

    model_class = "UNetModel"
    module_name = "comfy.ldm.modules.diffusionmodules.openaimodel"
    supports = "UNetModel (Stable Diffusion 1.x, 2.x, SDXL)"

    def matches(self, model: Any) -> bool:
        """Not if it makes videos: those have other transformers."""
        return super().matches(model) and any(type(layer).__name__ == TRANSFORMER for layer in model.modules())

    def blocks(self, model: Any) -> list[Block]:
        """All BasicTransformerBlocks: down, middle, up."""
        return [
            _describe(block, f"{name}.transformer_blocks.{number}", level)
            for name, layer, level in layers(model)
            if type(layer).__name__ == TRANSFORMER
            for number, block in enumerate(layer.transformer_blocks)
        ]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is halved from level to level, rounded up by a convolution and down by pooling."""
        sample = given["x"]
        height, width = sample.shape[-2:]
        grids = {"level 0": Grid(height, width)}
        for level, layer in enumerate(_downsamplers(model), start=1):
            rounding_up = 1 if layer.use_conv else 0
            height, width = (height + rounding_up) // 2, (width + rounding_up) // 2
            grids[f"level {level}"] = Grid(height, width)
        replaced = transformer_options(given).get("patches_replace") or {}
        resizes = patches(given, *SIZE_PATCHES)
        needs_all = patches(given, *TOKEN_PATCHES) or [name for name in ("attn1", "attn2") if replaced.get(name)]
        return Call(
            sample=sample,
            conditioning=given["context"],
            timestep=given["timesteps"],
            grids=grids,
            blocks_left_alone=f"other nodes patch its blocks ({', '.join(needs_all)})" if needs_all else None,
            left_alone=f"another node may resize the picture inside the model ({', '.join(resizes)})"
            if resizes
            else None,
        )


def layers(model: Any) -> Iterator[tuple[str, Any, int]]:
    """The name, the module and the level of every layer, in the order in which they run."""
    level = 0
    for index, block in enumerate(model.input_blocks):
        for number, layer in enumerate(block):
            yield f"input_blocks.{index}.{number}", layer, level
            level += _is(layer, "Downsample")
    for number, layer in enumerate(model.middle_block or ()):
        yield f"middle_block.{number}", layer, level
    for index, block in enumerate(model.output_blocks):
        for number, layer in enumerate(block):
            yield f"output_blocks.{index}.{number}", layer, level
            level -= _is(layer, "Upsample")


def _describe(module: Any, name: str, level: int) -> Block:
    is_patched = _gets_value if module.disable_self_attn else _gets_keys
    sites = [SiteSpec("attn1", frozenset({"attn"}), around("attn1"), is_patched)]
    if module.attn2 is not None:
        sites.append(SiteSpec("attn2", frozenset({"cross_attn"}), around("attn2"), _gets_value))
    sites.append(SiteSpec("ff", frozenset({"ff"}), around("ff")))
    return Block(
        name=name,
        module=module,
        kind=f"level {level}",
        run=name.partition(".transformer_blocks")[0],
        width=module.n_heads * module.d_head,
        sites=tuple(sites),
        normalize=_normalize,
        level=level,
    )


def _gets_keys(given: Given) -> bool:
    """Whether self-attention gets its keys from a patch of another node, which may also have changed the tokens."""
    return given["context"] is not None


def _gets_value(given: Given) -> bool:
    """The same for attention to text: only patches pass values of their own."""
    return given["value"] is not None


def _normalize(module: Any, given: Given) -> Tensor:
    tokens: Tensor = module.norm1(given.tokens)
    return tokens


def _is(layer: nn.Module, name: str) -> bool:
    return type(layer).__name__ == name


def _downsamplers(model: Any) -> list[Any]:
    return [layer for _, layer, _ in layers(model) if _is(layer, "Downsample")]
