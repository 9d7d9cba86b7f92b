"""QwenImageTransformer2DModel: Qwen-Image and Qwen-Image-Edit (only the generated image is merged)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, adds_residuals, around
from toma_diffusion.merge import Grid
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

ROTARY = PerToken("image_rotary_emb", item=0)
"""A pair of tables, for the image and for the text."""
MODULATION = PerToken("modulate_index", dims=(1,))
"""Of editing models: which tokens are modulated by the time, and which as clean references."""
MASK = PerToken("joint_attention_kwargs.attention_mask", dims=(3,))
"""Of text and image, for padded prompts. Later versions of diffusers than 0.38 make it in attention itself."""
MASK_OF_ATTENTION = PerToken("attention_mask", dims=(3,))


class QwenImageAdapter(Adapter):
    """One stack of joint blocks. The image comes first in its stream, reference images after it."""

    model_class = "QwenImageTransformer2DModel"
    supports = "QwenImageTransformer2DModel (Qwen-Image, Qwen-Image-Edit)"

    def obstacle(self, model: Any) -> str | None:
        """Models of layered images have one."""
        if model.config.get("use_layer3d_rope"):
            return "Qwen-Image-Layered makes several layers of an image at once, which is not supported."
        return None

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        return [Stack("transformer_blocks", _describe, left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the first image of every sample."""
        sample = given["hidden_states"]
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=given["timestep"],
            grids={"joint": grid_from_shapes([shapes[0] for shapes in given["img_shapes"]])},
            image_at=-sample.shape[1],
            joint=True,
            block_by_block=adds_residuals(given, "controlnet_block_samples"),
        )


def grid_from_shapes(shapes: list[tuple[int, int, int]]) -> Grid:
    """The grid of images of these frames, rows and columns, which must all be the same."""
    frames, height, width = shapes[0]
    if frames != 1 or any(tuple(shape) != tuple(shapes[0]) for shape in shapes):
        raise UsageError(
            f"img_shapes has {', '.join(map(str, shapes))} for the generated images of a batch: merging needs images "
            "of one size, with one frame. Generate them one by one, or use remove_toma."
        )
    return Grid(height, width)


def _describe(module: Any, name: str) -> Block:
    return Block(
        name=name,
        module=module,
        kind="joint",
        width=module.dim,
        sites=(
            SiteSpec("attn", frozenset({"attn"}), around("attn", ROTARY, MASK_OF_ATTENTION)),
            SiteSpec("img_mlp", frozenset({"ff"}), around("img_mlp")),
        ),
        normalize=Before(_before),
        per_token=(ROTARY, MODULATION, MASK),
        stream=1,
    )


def _before(module: Any, given: Given) -> Tensor:
    modulation = module.img_mod(given["temb"]).chunk(2, dim=-1)[0]
    tokens: Tensor = module._modulate(module.img_norm1(given.tokens), modulation, given["modulate_index"])[0]
    return tokens
