"""Inputs for denoisers of clips: random tensors in the shapes that their pipelines would pass."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError
from toma_lab.bench.requests import LATENT_FACTOR, PROMPT_TOKENS, Family, FrameGroups, RandomTensors, Request

TI2V_CHANNELS = 48
"""Of the latents of Wan 2.2 TI2V-5B, whose decoder makes 16 pixels of one, where that of the others makes 8."""
LTX_FACTOR, HUNYUAN_FACTOR, H3_FACTOR = 32, 16, 16
FRAME_RATE = 24.0
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729
"""HunyuanVideo 1.5: of the text to be written in the clip, and of its first image. Both are padding without them."""
H3_AUDIO_PER_SECOND, H3_AUDIO_CHANNELS = 40, 2
H3_FRAME_TIMES = (1, 4, 4, 4, 4)
"""How many frames the latent ones of MiniMax-H3 stand for, in turn."""
H3_TIME_SCALE, H3_SPACE_SCALE = 5 / 3, 32
WAN_FRAMES, LTX_FRAMES, H3_FRAMES = FrameGroups(4), FrameGroups(8), FrameGroups(17, 5, 5, 2)
SINGLE_FRAMES = FrameGroups(1)
"""Of an autoencoder of images."""


def _wan(
    config: Mapping[str, Any], request: Request, random: RandomTensors, groups: FrameGroups = WAN_FRAMES
) -> dict[str, Any]:
    """TI2V-5B has a time for every token."""
    per_token = config["in_channels"] == TI2V_CHANNELS
    factor = 2 * LATENT_FACTOR if per_token else LATENT_FACTOR
    if request.height % (2 * factor) or request.width % (2 * factor):
        raise UsageError(
            f"resolution '{request.width}x{request.height}' is not allowed: this model takes multiples of {2 * factor}."
        )
    size = (groups.latents(request.frames), request.height // factor, request.width // factor)
    tokens = [size[0] * (size[1] // 2) * (size[2] // 2)] if per_token else []
    return {
        "hidden_states": random(request.batch, config["in_channels"], *size),
        "encoder_hidden_states": random(request.batch, request.text_tokens, config["text_dim"]),
        "timestep": random.constant(500, request.batch, *tokens, dtype=torch.float32),
    }


def _ltx2(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Video and audio, each with its text."""
    batch, text = request.batch, (request.text_tokens, config["caption_channels"])
    frames, height, width = _sides(request, LTX_FRAMES, LTX_FACTOR)
    audio_per_second = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    audio = round((request.frames or 0) / FRAME_RATE * audio_per_second)
    return {
        "hidden_states": random(batch, frames * height * width, config["in_channels"]),
        "audio_hidden_states": random(batch, audio, config["audio_in_channels"]),
        "encoder_hidden_states": random(batch, *text),
        "audio_encoder_hidden_states": random(batch, *text),
        "timestep": random.constant(500, batch),
        "sigma": random.constant(500, batch),
        "encoder_attention_mask": random.constant(1, batch, request.text_tokens),
        "audio_encoder_attention_mask": random.constant(1, batch, request.text_tokens),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": FRAME_RATE,
        "audio_num_frames": audio,
    }


def _hunyuan15(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Text to video: most of the text is padding, and so are the tokens of glyphs and of the image."""
    batch, text_tokens = request.batch, request.text_tokens
    mask = torch.zeros(batch, text_tokens)
    mask[:, :PROMPT_TOKENS] = 1
    size = _sides(request, WAN_FRAMES, HUNYUAN_FACTOR)
    return {
        "hidden_states": random(batch, config["in_channels"], *size),
        "timestep": random.constant(500, batch),
        "encoder_hidden_states": random(batch, text_tokens, config["text_embed_dim"]),
        "encoder_attention_mask": mask.to(random.device, random.dtype),
        "encoder_hidden_states_2": random.constant(0, batch, GLYPH_TOKENS, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": random.constant(0, batch, GLYPH_TOKENS),
        "image_embeds": random.constant(0, batch, IMAGE_TOKENS, config["image_embed_dim"]),
    }


def _h3(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """One sequence of text, audio and video, without given frames."""
    batch, (frames, height, width) = request.batch, _sides(request, H3_FRAMES, 2 * H3_FACTOR)
    audio = round((request.frames or 0) / FRAME_RATE * H3_AUDIO_PER_SECOND)
    lengths = (request.text_tokens, audio * H3_AUDIO_CHANNELS, frames * height * width)
    text, sound, video = torch.arange(sum(lengths), device=random.device).split(lengths)
    tags = torch.zeros(sum(lengths), dtype=torch.int64, device=random.device)
    tags[text], tags[sound] = 1, 2
    channels = config["in_channels"] * config["patch_size"][1] * config["patch_size"][2]
    return {
        "hidden_states": random(batch, lengths[2], channels),
        "audio_hidden_states": random(batch, lengths[1], config["audio_in_channels"]),
        "encoder_hidden_states": random(batch, request.text_tokens, config["text_dim"]),
        "timestep": random.constant(0.5, 1, dtype=torch.float32),
        "timestep_indices": torch.zeros_like(tags),
        "token_tags": tags,
        "position_ids": _h3_positions(request.text_tokens, audio, frames, height, width).to(random.device),
        "video_indices": video,
        "audio_indices": sound,
        "text_indices": text,
    }


def _h3_positions(text_tokens: int, audio: int, frames: int, height: int, width: int) -> Tensor:
    """[sequence, 3]: time, row and column. The text is in time before audio and video."""
    mean = (height * width) ** 0.5
    rows, columns = (
        (torch.arange(side, dtype=torch.float64) / mean + (1 - side / mean) / 2) * H3_SPACE_SCALE
        for side in (height, width)
    )
    spans = torch.tensor(H3_FRAME_TIMES, dtype=torch.float64).repeat(frames)[:frames] * H3_TIME_SCALE
    video = torch.cartesian_prod(text_tokens + spans.cumsum(0) - spans, rows, columns)
    words, sound = torch.zeros(text_tokens, 3, dtype=torch.float64), torch.zeros(2, audio, 3, dtype=torch.float64)
    words[:, 0] = torch.arange(text_tokens)
    sound[..., 0] = text_tokens + torch.arange(audio)
    sound[..., 2] = torch.stack([columns[0], columns[-1]])[:, None]  # the left and the right channel
    return torch.cat([words, sound.reshape(-1, 3), video])


def _sides(request: Request, groups: FrameGroups, factor: int) -> tuple[int, int, int]:
    return groups.latents(request.frames), request.height // factor, request.width // factor


CLIP_FAMILIES: Mapping[str, Family] = {
    "WanTransformer3DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _wan, WAN_FRAMES),
    "LTX2VideoTransformer3DModel": Family("hidden_states", LTX_FACTOR, 1024, True, _ltx2, LTX_FRAMES),
    "MiniMaxH3Transformer3DModel": Family("hidden_states", 2 * H3_FACTOR, PROMPT_TOKENS, False, _h3, H3_FRAMES),
    "HunyuanVideo15Transformer3DModel": Family("hidden_states", HUNYUAN_FACTOR, 1000, False, _hunyuan15, WAN_FRAMES),
}
"""By the name of the model class."""
CLIP_PIPELINES: Mapping[str, Family] = {
    "DemoWanPipeline": Family(
        "hidden_states", 2 * LATENT_FACTOR, 32, False, partial(_wan, groups=SINGLE_FRAMES), SINGLE_FRAMES
    )
}
"""By the name of the pipeline class, where it calls the model differently from others of its class."""
