"""WanModel of ComfyUI: Wan 2.1 and 2.2, text to video and image to video."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toma_diffusion.comfyui.families.base import ComfyFamily, block_builder, replaced_blocks, rounded_up
from toma_diffusion.families import Call, Given, Grid, PerToken, Stack, site

POSITIONS = PerToken("freqs", dims=(1,))
"""[1, tokens, 1, channels / 2, 2, 2]."""


def _before(module: Any, given: Given) -> Tensor:
    time: Tensor = given["e"]
    time = time if time.ndim > 3 else time.unsqueeze(1)  # [batch, 1, 6, channels]
    shift, scale, *_ = (module.modulation.to(time) + time).unbind(-2)
    tokens: Tensor = module.norm1(given.tokens) * (1 + scale) + shift
    return tokens


class Wan(ComfyFamily):
    """One stack of blocks. A reference picture may come before the video, and frames of reference after it."""

    model_class = "WanModel"
    module_name = "comfy.ldm.wan.model"
    supports = "WanModel (Wan 2.1, 2.2; not Vace, Camera, S2V, HuMo, Animate)"
    one_table = True
    stacks = (
        Stack(
            "blocks",
            "block",
            block_builder(
                "dim",
                sites=(site("attn", "self_attn", POSITIONS), site("cross_attn", "cross_attn"), site("ff", "ffn")),
                normalize=_before,
                per_token=(POSITIONS,),
            ),
            left_whole=1 / 8,
        ),
    )

    def read_call(self, model: Any, given: Given) -> Call:
        """The grid is that of the frames that are generated."""
        sides = zip(given["x"].shape[-3:], model.patch_size, strict=True)
        frames, height, width = (rounded_up(side, patch) for side, patch in sides)
        grid = Grid(height, width, frames)
        before = 0 if model.ref_conv is None or given["reference_latent"] is None else height * width
        after, references = 0, given["time_dim_concat"]
        if references is not None:
            after = rounded_up(references.shape[2], model.patch_size[0]) * height * width
        times = given["timestep"]
        has_times = times.ndim > 1 and times.shape[1] > 1
        return self.call(
            model,
            given,
            grid,
            image_at=before,
            lengths={"block": before + grid.num_tokens + after},
            first_frame_apart=True,
            block_by_block=replaced_blocks(given),
            blocks_left_whole="every frame has a time of its own" if has_times else None,
        )
