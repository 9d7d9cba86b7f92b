"""LTX2VideoTransformer3DModel: LTX-2, video and audio. Only the video is merged."""

from __future__ import annotations

from typing import Any

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Family, Stack
from toma_diffusion.families.builders import cross_block
from toma_diffusion.families.grids import grid_of_patches, without_first_frame
from toma_diffusion.families.modulation import from_table
from toma_diffusion.merge.block import Block
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

TIMES = tuple(PerToken(name, dims=(1,)) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate"))
"""With a row for every token if the video has a time for each."""
MASKS = (PerToken("self_attention_mask", dims=(1, 2)), PerToken("attention_mask", dims=(1, 2)))
"""A block calls it otherwise than its attention."""


def _build(module: Any, name: str, kind: str) -> Block:
    rows = 2 if module.attn1.rope_type == "split" else 1  # [batch, heads, tokens, ·] or [batch, tokens, ·]
    video, crossing, query = (
        PerToken(each, dims=(rows,)) for each in ("video_rotary_emb", "ca_video_rotary_emb", "query_rotary_emb")
    )
    build = cross_block(
        from_table(),
        *(*TIMES, video, crossing, query, *MASKS),
        cross_attention=("attn2", "audio_to_video_attn"),
        per_query=(query,),
        stream=0,
    )
    return build(module, name, kind)


class LTX2(Family):
    """One stack of blocks on two streams, video and audio, which attend to each other.

    Audio stays whole. In `module` scope it attends to all tokens of the video (`video_to_audio_attn` is left alone). In
    the other scopes it attends to the merged tokens, at the times of their destinations: inside merged blocks there
    are no others.

    Keyframes and references may come after the video, and stay whole. So does the first frame of a video with a time
    for every token: it may be given. If more frames are, they are kept apart only by `region_frames=1`.
    """

    model_class = "LTX2VideoTransformer3DModel"
    supports = "LTX2VideoTransformer3DModel (LTX-2)"
    stacks = (Stack("transformer_blocks", "block", _build, left_whole=1 / 8),)

    def read_call(self, model: Any, given: Given) -> Call:
        """The size of the video is passed, that of its reference tokens is not."""
        length, timestep, config = given["hidden_states"].shape[1], given["timestep"], model.config
        sides = [given[name] for name in ("num_frames", "height", "width")]
        if None in sides:
            raise UsageError("LTX-2 was called without num_frames, height and width, which merging needs: pass them.")
        whole = grid_of_patches(sides, (config.patch_size_t, config.patch_size, config.patch_size))
        if length < whole.num_tokens:
            raise UsageError(f"{length} tokens are fewer than a video of {whole.describe()} tokens has.")
        may_be_given = timestep.ndim == 2 and timestep.shape[1] > 1 and whole.frames > 1
        grid = without_first_frame(whole) if may_be_given else whole
        return self.call(
            model,
            given,
            grid,
            timestep=timestep if given["sigma"] is None else given["sigma"],  # the one that is not changed per token
            image_at=whole.num_tokens - grid.num_tokens,
            lengths={"block": length},
            first_frame_apart=not may_be_given,
        )
