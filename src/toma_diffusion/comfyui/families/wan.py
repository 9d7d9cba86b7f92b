"""WanModel of ComfyUI: Wan 2.1 and 2.2, text to video and image to video."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.comfyui.families.base import ComfyAdapter, replaced_blocks, rounded_up
from toma_diffusion.engine.arguments import Given
from toma_diffusion.families import Call, Grid, PerToken, around, first_blocks
from toma_diffusion.merge.block import Block, SiteSpec

POSITIONS = PerToken("freqs", dims=(1,))
"""[1, tokens, 1, channels / 2, 2, 2]."""


class WanAdapter(ComfyAdapter):
    """One stack of blocks. A reference picture may come before the video, and frames of reference after it."""

    model_class = "WanModel"
    module_name = "comfy.ldm.wan.model"
    supports = "WanModel (Wan 2.1, 2.2; not Vace, Camera, S2V, HuMo, Animate)"

    def skip_blocks(self, model: Any) -> tuple[int, ...]:
        """Select in every step, leave the first eighth of the blocks."""
        return first_blocks((len(model.blocks), 1 / 8))

    def blocks(self, model: Any) -> list[Block]:
        """The stack."""
        return [_describe(block, index) for index, block in enumerate(model.blocks)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the frames that are generated."""
        sample, times = given["x"], given["timestep"]
        frames, height, width = (
            rounded_up(side, patch) for side, patch in zip(sample.shape[-3:], model.patch_size, strict=True)
        )
        grid = Grid(height, width, frames)
        before = 0 if model.ref_conv is None or given["reference_latent"] is None else height * width
        after = 0
        if given["time_dim_concat"] is not None:
            after = rounded_up(given["time_dim_concat"].shape[2], model.patch_size[0]) * height * width
        replaced = replaced_blocks(given)
        has_times = times.ndim > 1 and times.shape[1] > 1
        return Call(
            sample=sample,
            conditioning=given["context"],
            timestep=times,
            grids={"block": grid},
            image_at=before,
            lengths={"block": before + grid.num_tokens + after},
            first_frame_apart=True,
            joint=True,
            block_by_block=replaced,
            blocks_left_alone="every frame has a time of its own" if has_times else None,
        )


def _describe(module: Any, index: int) -> Block:
    return Block(
        name=f"blocks.{index}",
        module=module,
        kind="block",
        width=module.dim,
        sites=(
            SiteSpec("self_attn", frozenset({"attn"}), around("self_attn", POSITIONS)),
            SiteSpec("cross_attn", frozenset({"cross_attn"}), around("cross_attn")),
            SiteSpec("ffn", frozenset({"ff"}), around("ffn")),
        ),
        normalize=_before,
        per_token=(POSITIONS,),
    )


def _before(module: Any, given: Given) -> Tensor:
    time: Tensor = given["e"]
    time = time if time.ndim > 3 else time.unsqueeze(1)  # [batch, 1, 6, channels]
    shift, scale, *_ = (module.modulation.to(time) + time).unbind(-2)
    tokens: Tensor = module.norm1(given.tokens) * (1 + scale) + shift
    return tokens
