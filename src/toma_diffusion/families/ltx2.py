"""LTX2VideoTransformer3DModel: LTX-2, video and audio. Only the video is merged."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.errors import UsageError
from toma_diffusion.families.base import Adapter, Before, Block, SiteSpec, Stack, around
from toma_diffusion.families.frames import grid_of_patches, without_first_frame
from toma_diffusion.merge.sites import PerToken
from toma_diffusion.merge.state import Call

AUDIO = "audio_hidden_states"
TIMES = tuple(PerToken(name, dims=(1,)) for name in ("temb", "temb_ca_scale_shift", "temb_ca_gate"))
"""With a row for every token if the video has a time for each."""
MASK, MASK_OF_ATTENTION = PerToken("self_attention_mask", dims=(1, 2)), PerToken("attention_mask", dims=(1, 2))


class LTX2Adapter(Adapter):
    """One stack of blocks on two streams, video and audio, which attend to each other.

    Audio stays whole. In `module` scope it attends to all tokens of the video (`video_to_audio_attn` is left alone). In
    the other scopes it attends to the merged tokens, at the times of their destinations: inside merged blocks there
    are no others.

    Keyframes and references may come after the video, and stay whole. So does the first frame of a video with a time
    for every token: it may be given. If more frames are, they are kept apart only by `region_frames=1`.
    """

    model_class = "LTX2VideoTransformer3DModel"
    supports = "LTX2VideoTransformer3DModel (LTX-2)"

    def is_joint(self, model: nn.Module) -> bool:
        """Every sample has its own table of positions."""
        return False

    def stacks(self, model: Any) -> list[Stack]:
        """One."""
        rows = 2 if model.config.rope_type == "split" else 1  # [batch, heads, tokens, ·] or [batch, tokens, ·]
        return [Stack("transformer_blocks", partial(_describe, rows=rows), left_whole=1 / 8)]

    def read_call(self, model: Any, given: Given) -> Call:
        """The size of the video is passed, that of its reference tokens is not."""
        sample, timestep, config = given["hidden_states"], given["timestep"], model.config
        sides = [given[name] for name in ("num_frames", "height", "width")]
        if None in sides:
            raise UsageError("LTX-2 was called without num_frames, height and width, which merging needs: pass them.")
        whole = grid_of_patches(sides, (config.patch_size_t, config.patch_size, config.patch_size))
        length = sample.shape[1]
        if length < whole.num_tokens:
            raise UsageError(f"{length} tokens are fewer than a video of {whole.describe()} tokens has.")
        may_be_given = timestep.ndim == 2 and timestep.shape[1] > 1 and whole.frames > 1
        grid = without_first_frame(whole) if may_be_given else whole
        return Call(
            sample=sample,
            conditioning=given["encoder_hidden_states"],
            timestep=timestep if given["sigma"] is None else given["sigma"],  # the one that is not changed per token
            grids={"block": grid},
            image_at=whole.num_tokens - grid.num_tokens,
            lengths={"block": length, AUDIO: given[AUDIO].shape[1]},
            first_frame_apart=not may_be_given,
        )


def _describe(module: Any, name: str, rows: int) -> Block:
    rotary, video, crossing = (
        PerToken(each, dims=(rows,)) for each in ("query_rotary_emb", "video_rotary_emb", "ca_video_rotary_emb")
    )
    return Block(
        name=name,
        module=module,
        kind="block",
        width=module.attn1.query_dim,
        sites=(
            SiteSpec("attn1", frozenset({"attn"}), around("attn1", rotary, MASK_OF_ATTENTION)),
            SiteSpec("attn2", frozenset({"cross_attn"}), around("attn2")),
            SiteSpec("audio_to_video_attn", frozenset({"cross_attn"}), around("audio_to_video_attn", rotary)),
            SiteSpec("ff", frozenset({"ff"}), around("ff")),
        ),
        normalize=Before(_before),
        per_token=(*TIMES, video, crossing, MASK),
        stream=0,
    )


def _before(module: Any, given: Given) -> Tensor:
    tokens = given.tokens
    shift, scale, *_ = module.get_mod_params(module.scale_shift_table, given["temb"], len(tokens))
    normalized: Tensor = module.norm1(tokens) * (1 + scale) + shift
    return normalized
