"""Tiny real video models of every family. Tests of those that this diffusers does not have are skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import diffusers
import pytest
import torch
from tiny import Family, seeded
from tiny_today import lively
from torch import nn

TEXT_TOKENS, TEXT_WIDTH, AUDIO_TOKENS = 6, 32, 5
MASKED_LTX2 = "video_self_attention_mask" in signature(diffusers.LTX2VideoTransformer3DModel.forward).parameters
"""Whether this diffusers can keep references apart by a mask."""
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
HUNYUAN = HEADS | {
    "out_channels": 4,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": TEXT_WIDTH,
    "rope_axes_dim": (4, 6, 6),
}
CONFIGS = {
    "WanTransformer3DModel": HEADS
    | {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "cross_attn_norm": True,
        "rope_max_seq_len": 64,
    },
    "LTX2VideoTransformer3DModel": HEADS
    | {
        "in_channels": 8,
        "out_channels": 8,
        "cross_attention_dim": 32,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 3,
        "caption_channels": TEXT_WIDTH,
    },
    "MiniMaxH3Transformer3DModel": HEADS
    | {
        "hidden_size": 32,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 64,
        "in_channels": 2,
        "audio_in_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "time_embed_hidden_dim": 32,
        "time_embed_dim": 32,
        "rope_freq_dim": 2,
    },
    "HunyuanVideo15Transformer3DModel": HUNYUAN
    | {"in_channels": 4, "patch_size": 2, "text_embed_2_dim": 16, "image_embed_dim": 8, "num_layers": 3},
    "HunyuanVideoTransformer3DModel": HUNYUAN | {"in_channels": 4, "num_single_layers": 3, "pooled_projection_dim": 8},
    "CogVideoXTransformer3DModel": HEADS
    | {
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 3,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 13,
        "max_text_seq_length": TEXT_TOKENS,
        "use_rotary_positional_embeddings": True,
    },
    "MochiTransformer3DModel": HEADS
    | {
        "num_layers": 3,
        "pooled_projection_dim": 16,
        "in_channels": 4,
        "text_embed_dim": 64,
        "time_embed_dim": 32,
        "max_sequence_length": TEXT_TOKENS,
    },
}


def build(class_name: str, **fixed) -> Callable[..., nn.Module]:
    def model(**changes) -> nn.Module:
        if not hasattr(diffusers, class_name):
            pytest.skip(f"this diffusers has no {class_name}")
        return lively(seeded(lambda: getattr(diffusers, class_name)(**CONFIGS[class_name] | fixed | changes)))

    return model


def common(batch: int, seed: int, *sample: int, text_width: int = TEXT_WIDTH) -> tuple[torch.Generator, dict]:
    """What all models take: a sample of that shape, text, and a time."""
    generator = torch.Generator().manual_seed(seed)
    return generator, {
        "hidden_states": torch.randn(batch, *sample, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, text_width, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }


def padded(batch: int) -> torch.Tensor:
    """A mask of the text, whose last two tokens are padding."""
    mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.bool)
    mask[:, -2:] = False
    return mask


def wan_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    return common(batch, seed, 4, frames, height, wide)[1]


def ti2v_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    """The first frame is given: its time is 0."""
    times = torch.full((batch, frames, height // 2 * (wide // 2)), 500.0)
    times[:, 0] = 0
    return wan_inputs(batch, height, wide, seed, frames) | {"timestep": times.flatten(1)}


def ltx2_inputs(batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, frames * height * wide, 8)
    return inputs | {
        "audio_hidden_states": torch.randn(batch, AUDIO_TOKENS, 4, generator=generator),
        "audio_encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH, generator=generator),
        "encoder_attention_mask": padded(batch).float(),
        "audio_encoder_attention_mask": padded(batch).float(),
        "num_frames": frames,
        "height": height,
        "width": wide,
        "audio_num_frames": AUDIO_TOKENS,
    }


def ltx2_given_inputs(batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4) -> dict:
    """The first frame is given, and a reference of two tokens comes after the video, which a mask keeps apart."""
    inputs, tokens = ltx2_inputs(batch, height, wide, seed, frames), frames * height * wide
    times = torch.full((batch, tokens + 2), 500.0)
    times[:, : height * wide] = times[:, tokens:] = 0
    mask = torch.ones(batch, tokens + 2, tokens + 2)
    mask[:, :tokens, tokens:] = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(seed))
    masks = {"video_self_attention_mask": mask} if MASKED_LTX2 else {}
    references = torch.full((batch, 2, 8), 0.5)
    coordinates = torch.rand(batch, 3, tokens + 2, 2, generator=torch.Generator().manual_seed(7))
    return inputs | {
        "hidden_states": torch.cat([inputs["hidden_states"], references], dim=1),
        "timestep": times,
        "audio_timestep": torch.full((batch,), 500.0),
        "video_coords": coordinates,
        **masks,
    }


def h3_positions(frames: int, height: int, wide: int, keyframes: int = 1) -> torch.Tensor:
    """(time, row, column) of text, given frames, audio and video, as the pipeline makes them: of uneven spacing."""
    rows, columns = torch.arange(height) * 1.5 - 3, torch.arange(wide) * 1.5 + 2
    plane = torch.cartesian_prod(rows, columns).double().reshape(-1, 2)
    text = torch.zeros(TEXT_TOKENS, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(TEXT_TOKENS)
    audio = torch.zeros(AUDIO_TOKENS, 3, dtype=torch.float64)
    audio[:, 0] = TEXT_TOKENS + torch.arange(AUDIO_TOKENS)
    times = TEXT_TOKENS + torch.tensor([0, 5 / 3, *(25 / 3 + 20 / 3 * torch.arange(60)).tolist()])[:frames].double()
    video = torch.cat([times.repeat_interleave(len(plane))[:, None], plane.repeat(frames, 1)], dim=1)
    given = torch.cat([torch.full((len(plane), 1), float(TEXT_TOKENS)), plane], dim=1).repeat(keyframes, 1)
    return torch.cat([text, given, audio, video])


def h3_inputs(
    batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4, keyframes: int = 1
) -> dict:
    """One keyframe is given. Video, audio and what is given have times of their own."""
    size = height * wide
    generator, inputs = common(batch, seed, (frames + keyframes) * size, 8)
    text, given, audio, video = torch.arange(TEXT_TOKENS + keyframes * size + AUDIO_TOKENS + frames * size).split(
        [TEXT_TOKENS, keyframes * size, AUDIO_TOKENS, frames * size]
    )
    length = int(video[-1]) + 1
    tags, times = torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    times[video], times[audio] = 1, 2
    return inputs | {
        "audio_hidden_states": torch.randn(batch, AUDIO_TOKENS, 4, generator=generator),
        "timestep": torch.tensor([0.0, 0.5, 0.25]),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": h3_positions(frames, height, wide, keyframes),
        "video_indices": torch.cat([given, video]),
        "audio_indices": audio,
        "text_indices": text,
    }


def hunyuan15_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, 4, frames, height, wide)
    return inputs | {
        "encoder_attention_mask": padded(batch),
        "encoder_hidden_states_2": torch.randn(batch, 3, 16, generator=generator),
        "encoder_attention_mask_2": torch.ones(batch, 3, dtype=torch.bool),
        "image_embeds": torch.randn(batch, 2, 8, generator=generator),
    }


def hunyuan_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, 4, frames, height, wide)
    return inputs | {
        "encoder_attention_mask": padded(batch),
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    inputs = added_inputs(batch, height, wide, seed, frames)
    angles = torch.rand(frames * (height // 2) * (wide // 2), 16, generator=torch.Generator().manual_seed(7)) * 6
    return inputs | {"image_rotary_emb": (angles.cos(), angles.sin())}


def added_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    return common(batch, seed, frames, 4, height, wide)[1]


def mochi_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    inputs = common(batch, seed, 4, frames, height, wide, text_width=64)[1]
    return inputs | {"encoder_attention_mask": padded(batch)}


Rows = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Video(Family):
    """A family of video models. Its default input has 4 frames of 4×4 tokens."""

    joint: bool = True
    """Whether all samples share their destinations."""
    patch: int = 2
    """Latents of a token's side."""
    given: int = 0
    """Frames at the beginning that are given, and stay whole."""
    attention: str = "attn"
    """The self-attention in its blocks."""
    rotary: str = "image_rotary_emb"
    """The argument of self-attention that holds positions."""
    block_rows: Rows = field(default_factory=dict, hash=False)
    """The arguments of its first block with a row for every token, and the dimensions of the rows."""
    attention_rows: Rows = field(default_factory=dict, hash=False)
    """Those of its self-attention."""
    before: int = 0
    """Tokens before the frames in the sequence."""
    after: int = 0
    """Tokens after them."""
    stack: str = "transformer_blocks"
    """Where its first blocks are."""

    def block(self, model: nn.Module) -> nn.Module:
        return getattr(model, self.stack)[0]

    def sized(self, frames: int, height: int, width: int, **arguments) -> dict:
        """Inputs of so many tokens."""
        return self.inputs(height=self.patch * height, wide=self.patch * width, frames=frames, **arguments)


HUNYUAN_ROWS = {"freqs_cis": (0,), "attention_mask": (3,)}
ALL = {
    "wan": (
        "WanTransformer3DModel",
        wan_inputs,
        {},
        {
            "stack": "blocks",
            "attention": "attn1",
            "rotary": "rotary_emb",
            "joint": False,
            "block_rows": {"rotary_emb": (1,)},
            "attention_rows": {"rotary_emb": (1,)},
        },
    ),
    "wan-ti2v": (
        "WanTransformer3DModel",
        ti2v_inputs,
        {},
        {
            "stack": "blocks",
            "attention": "attn1",
            "rotary": "rotary_emb",
            "joint": False,
            "given": 1,
            "block_rows": {"rotary_emb": (1,), "temb": (1,)},
            "attention_rows": {"rotary_emb": (1,)},
        },
    ),
    "ltx2": (
        "LTX2VideoTransformer3DModel",
        ltx2_inputs,
        {},
        {
            "attention": "attn1",
            "rotary": "query_rotary_emb",
            "joint": False,
            "patch": 1,
            "block_rows": {"video_rotary_emb": (1,), "ca_video_rotary_emb": (1,)},
            "attention_rows": {"query_rotary_emb": (1,)},
        },
    ),
    "ltx2-given": (
        "LTX2VideoTransformer3DModel",
        ltx2_given_inputs,
        {"rope_type": "split"},
        {
            "attention": "attn1",
            "rotary": "query_rotary_emb",
            "joint": False,
            "patch": 1,
            "given": 1,
            "after": 2,
            "block_rows": {
                "video_rotary_emb": (2,),
                "ca_video_rotary_emb": (2,),
                "temb": (1,),
                "temb_ca_scale_shift": (1,),
                "temb_ca_gate": (1,),
                "self_attention_mask": (1, 2),
            },
            "attention_rows": {"query_rotary_emb": (2,), "attention_mask": (1, 2)},
        },
    ),
    "h3": (
        "MiniMaxH3Transformer3DModel",
        h3_inputs,
        {},
        {
            "rotary": "rotary_emb",
            "patch": 1,
            "before": TEXT_TOKENS + 16 + AUDIO_TOKENS,
            "block_rows": {"rotary_emb": (0,), "adaln_indices": (0,)},
            "attention_rows": {"rotary_emb": (0,)},
        },
    ),
    "hunyuan15": (
        "HunyuanVideo15Transformer3DModel",
        hunyuan15_inputs,
        {},
        {"block_rows": {"freqs_cis": (0,)}, "attention_rows": {"image_rotary_emb": (0,)}},
    ),
    "hunyuan": (
        "HunyuanVideoTransformer3DModel",
        hunyuan_inputs,
        {},
        {"block_rows": HUNYUAN_ROWS, "attention_rows": {"image_rotary_emb": (0,), "attention_mask": (3,)}},
    ),
    "hunyuan-replace": (
        "HunyuanVideoTransformer3DModel",
        hunyuan_inputs,
        {"image_condition_type": "token_replace"},
        {"given": 1, "block_rows": HUNYUAN_ROWS, "attention_rows": {"image_rotary_emb": (0,), "attention_mask": (3,)}},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        cogvideox_inputs,
        {},
        {
            "attention": "attn1",
            "block_rows": {"image_rotary_emb": (0,)},
            "attention_rows": {"image_rotary_emb": (0,)},
        },
    ),
    "cogvideox-added": (
        "CogVideoXTransformer3DModel",
        added_inputs,
        {"use_rotary_positional_embeddings": False},
        {"attention": "attn1", "joint": False},
    ),
    "mochi": (
        "MochiTransformer3DModel",
        mochi_inputs,
        {},
        {
            "attention": "attn1",
            "joint": False,
            "block_rows": {"image_rotary_emb": (0,)},
            "attention_rows": {"image_rotary_emb": (0,)},
        },
    ),
}


def _family(name: str) -> Video:
    class_name, inputs, fixed, facts = ALL[name]
    kinds = 2 if class_name == "HunyuanVideoTransformer3DModel" else 1
    return Video(name, build(class_name, **fixed), inputs, kinds, **facts)


VIDEO = [_family(name) for name in ALL]


def chosen(*names: str) -> list[Video]:
    """Some families."""
    return [family for family in VIDEO if family.name in names]
