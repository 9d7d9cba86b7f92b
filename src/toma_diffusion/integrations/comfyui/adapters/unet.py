"""UNetModel of ComfyUI: Stable Diffusion 1.x and 2.x, SDXL and its refiner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from toma_diffusion.adapters import Block, Call, Given, Grid, Part, PassOn, SiteSpec, Stream, around, part_of
from toma_diffusion.integrations.comfyui.adapters.base import ComfyAdapter, patches, transformer_options

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

    def parts(self, model: Any, deep: bool) -> list[Part]:
        """The blocks of every `SpatialTransformer`. With `deep`, everything below the first level is one part."""
        below = below_first_level(model) if deep else None
        if below is None:
            return super().parts(model, deep)
        above = [block for block in self.blocks(model) if block.level == 0]
        return [*(part_of(list(blocks)) for _, blocks in groupby(above, key=lambda block: block.run)), below]

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
        needs_all = patches(given, *TOKEN_PATCHES) or [name for name in ("attn1", "attn2") if replaced.get(name)]
        return Call(
            sample=sample,
            conditioning=given["context"],
            timestep=given["timesteps"],
            grids=grids,
            blocks_left_alone=f"other nodes patch its blocks ({', '.join(needs_all)})" if needs_all else None,
        )

    def reason_to_leave_alone(self, model: Any, given: Given) -> str | None:
        """Patches that may change the size of the picture on its way."""
        found = patches(given, *SIZE_PATCHES)
        return f"another node may resize the picture inside the model ({', '.join(found)})" if found else None


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


def below_first_level(model: Any) -> Part | None:
    """All layers from the first `Downsample` to the last `Upsample`. None if there are none, or others among them."""
    every = [layer for _, layer, _ in layers(model)]
    down = next((index for index, layer in enumerate(every) if _is(layer, "Downsample")), None)
    up = next((index for index in reversed(range(len(every))) if _is(every[index], "Upsample")), None)
    if down is None or up is None:
        return None
    inside = every[down : up + 1]
    if any(type(layer).__name__ not in STAND_INS for layer in inside):
        return None
    return Part(
        name="below level 0",
        modules=tuple(inside),
        stand_ins=tuple(STAND_INS[type(layer).__name__] for layer in inside),
        streams=(Stream(LatentShape(inside[-1].out_channels)),),
    )


@dataclass(frozen=True)
class LatentShape:
    """The shape of the first level, with so many channels."""

    channels: int

    def __call__(self, call: Call) -> tuple[int, ...]:
        """In that call."""
        batch, _, height, width = call.sample.shape
        return batch, self.channels, height, width


@dataclass(frozen=True)
class Zeros:
    """What a convolutional layer returns if it does not run: zeros in the shape of its result. Only layers that do not
    run either read them, and a ControlNet, which adds to them."""

    scale: float = 1.0
    """Of the picture's sides."""

    def __call__(self, module: Any, given: Given) -> Tensor:
        """In the shape of the result."""
        tokens = given.tokens
        height, width = tokens.shape[-2:]
        wanted = given["output_shape"]
        if wanted is not None:
            height, width = wanted[-2:]
        elif self.scale < 1:
            rounding_up = 1 if module.use_conv else 0
            height, width = (height + rounding_up) // 2, (width + rounding_up) // 2
        elif self.scale > 1:
            height, width = 2 * height, 2 * width
        return tokens.new_zeros(tokens.shape[0], module.out_channels, height, width)


STAND_INS: Mapping[str, Callable[[Any, Given], Tensor]] = {
    "Downsample": Zeros(0.5),
    "ResBlock": Zeros(),
    TRANSFORMER: PassOn(),
    "Upsample": Zeros(2.0),
}
"""What each kind of layer returns if it does not run."""


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
