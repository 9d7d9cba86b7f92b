"""Inputs for one call of a denoiser: random tensors in the shapes that its pipeline would pass, by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from toma_diffusion.errors import UsageError

LATENT_FACTOR = 8
"""Pixels per latent in all families of images, and in Wan."""
PROMPT_TOKENS, EMPTY_PROMPT_TOKENS = 128, 8
"""A prompt of some eighty words, and an empty one with its template, where pipelines do not pad all to one length."""
SDXL_TIME_IDS = 6
"""The original size, the corner of the crop and the target size."""
TI2V_CHANNELS = 48
"""Latent channels of Wan 2.2 TI2V-5B, whose decoder makes 16 pixels of a latent, where that of the others makes 8."""
LTX_FACTOR, HUNYUAN_FACTOR, H3_FACTOR = 32, 16, 32
FRAME_RATE = 24.0
GLYPH_TOKENS, IMAGE_TOKENS = 256, 729
"""HunyuanVideo 1.5: of the text to be written in the clip, and of its first image. Both are padding without them."""
H3_AUDIO_PER_SECOND, H3_AUDIO_CHANNELS = 40, 2
H3_FRAME_TIMES = (1, 4, 4, 4, 4)
"""How many frames each latent frame of MiniMax-H3 stands for, in turn."""
H3_TIME_SCALE, H3_SPACE_SCALE = 5 / 3, 32


@dataclass(frozen=True)
class FrameGroups:
    """How a decoder makes frames: `first` frames from the first latents, `step` frames from each group after them."""

    step: int
    first: int = 1
    latents_of_step: int = 1
    latents_of_first: int = 1

    def latents(self, frames: int | None) -> int:
        """The number of latent frames of a clip."""
        groups, left = divmod((frames or 0) - self.first, self.step)
        if groups < 0 or left:
            raise UsageError(
                f"frames={frames} is not allowed: this model makes {self.first}, {self.first + self.step}, "
                f"{self.first + 2 * self.step}, … ({self.step}·n + {self.first})."
            )
        return self.latents_of_first + groups * self.latents_of_step


@dataclass(frozen=True)
class Call:
    """One call to make inputs for: its sizes, and tensors in the denoiser's type, the same in every run."""

    config: Mapping[str, Any]
    """The denoiser's."""
    batch: int
    width: int
    """In pixels, as `height`."""
    height: int
    text_tokens: int
    frames: int | None
    """Of a clip, as it is decoded."""
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, where latents are packed 2×2."""
        return self.height // (2 * LATENT_FACTOR), self.width // (2 * LATENT_FACTOR)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def constant(self, value: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, value, device=self.device, dtype=dtype or self.dtype)

    def packed(self) -> Tensor:
        """[batch, tokens, channels]"""
        return self.noise(self.batch, prod(self.grid), self.config["in_channels"])

    def latents(self) -> Tensor:
        """[batch, channels, height, width]"""
        size = (self.height // LATENT_FACTOR, self.width // LATENT_FACTOR)
        return self.noise(self.batch, self.config["in_channels"], *size)

    def text(self, *widths: str) -> Tensor:
        """[batch, text tokens, …], with the widths of these names in the configuration."""
        return self.noise(self.batch, self.text_tokens, *(self.config[name] for name in widths))

    def clip_sides(self, groups: FrameGroups, factor: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns."""
        return groups.latents(self.frames), self.height // factor, self.width // factor

    def grid_ids(self, axes: int) -> Tensor:
        """[tokens, axes]: zero, row and column, then zeros."""
        rows, columns = self.grid
        ids = torch.zeros(rows, columns, axes)
        ids[..., 1] = torch.arange(rows)[:, None]
        ids[..., 2] = torch.arange(columns)[None]
        return ids.reshape(-1, axes)


def _unet(call: Call) -> dict[str, Any]:
    config = call.config
    inputs: dict[str, Any] = {
        "sample": call.latents(),
        "timestep": call.constant(500, dtype=torch.int64),
        "encoder_hidden_states": call.text("cross_attention_dim"),
    }
    if config["addition_embed_type"] == "text_time":  # SDXL
        inputs["timestep"] = call.constant(500, dtype=torch.float32)  # its scheduler has no whole numbers
        pooled = config["projection_class_embeddings_input_dim"] - SDXL_TIME_IDS * config["addition_time_embed_dim"]
        sizes = (call.height, call.width, 0, 0, call.height, call.width)
        time_ids = torch.tensor(sizes, device=call.device, dtype=call.dtype).expand(call.batch, -1).contiguous()
        inputs["added_cond_kwargs"] = {"text_embeds": call.noise(call.batch, pooled), "time_ids": time_ids}
    return inputs


def _usual(call: Call, *text: str, sample: Tensor | None = None, time: float = 0.5) -> dict[str, Any]:
    """What most transformers take: packed latents or another sample, text of these widths, and a time."""
    return {
        "hidden_states": call.packed() if sample is None else sample,
        "encoder_hidden_states": call.text(*text),
        "timestep": call.constant(time, call.batch),
    }


def _flux(call: Call) -> dict[str, Any]:
    inputs = _usual(call, "joint_attention_dim") | {
        "pooled_projections": call.noise(call.batch, call.config["pooled_projection_dim"]),
        "img_ids": call.grid_ids(3).to(call.device, call.dtype),
        "txt_ids": call.constant(0, call.text_tokens, 3),
    }
    if call.config["guidance_embeds"]:
        inputs["guidance"] = call.constant(3.5, call.batch, dtype=torch.float32)
    return inputs


def _sd3(call: Call) -> dict[str, Any]:
    inputs = _usual(call, "joint_attention_dim", sample=call.latents(), time=500)
    return inputs | {"pooled_projections": call.noise(call.batch, call.config["pooled_projection_dim"])}


def _pixart(call: Call) -> dict[str, Any]:
    has_sizes = call.config["use_additional_conditions"]
    if has_sizes is None:  # models of 1024×1024 have
        has_sizes = call.height == call.width == 128 * LATENT_FACTOR
    sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if has_sizes:
        sizes["resolution"] = call.noise(call.batch, 2)
        sizes["aspect_ratio"] = call.constant(call.height / call.width, call.batch, 1)
    return _usual(call, "caption_channels", sample=call.latents()) | {
        "timestep": call.constant(500, call.batch, dtype=torch.int64),
        "added_cond_kwargs": sizes,
    }


def _flux2(call: Call) -> dict[str, Any]:
    """Positions have four numbers: of the reference image, row, column, and place in the text."""
    text_ids = torch.zeros(call.text_tokens, 4, dtype=torch.int64)
    text_ids[:, 3] = torch.arange(call.text_tokens)
    inputs = _usual(call, "joint_attention_dim") | {
        "img_ids": call.grid_ids(4).long().to(call.device),
        "txt_ids": text_ids.to(call.device),
    }
    if call.config.get("guidance_embeds"):
        inputs["guidance"] = call.constant(4.0, call.batch, dtype=torch.float32)
    return inputs


def _chroma(call: Call) -> dict[str, Any]:
    """The text is padded; a mask covers text and image."""
    mask = torch.ones(call.batch, call.text_tokens + prod(call.grid), dtype=torch.bool)
    mask[:, min(call.text_tokens, PROMPT_TOKENS) : call.text_tokens] = False
    return _usual(call, "joint_attention_dim") | {
        "img_ids": call.grid_ids(3).to(call.device, call.dtype),
        "txt_ids": call.constant(0, call.text_tokens, 3),
        "attention_mask": mask.to(call.device),
    }


def _qwen_image(call: Call, text: str = "joint_attention_dim") -> dict[str, Any]:
    """Prompts are not padded, so there is no mask."""
    return _usual(call, text) | {"img_shapes": [[(1, *call.grid)]] * call.batch}


def _qwen_image21(call: Call) -> dict[str, Any]:
    """Without the KV cache of its pipeline, which leaves the text out from the second step on. After the text there is
    a place for every 2×2 tokens of the image."""
    places = torch.zeros(call.batch, call.text_tokens + prod(call.grid) // 4, dtype=torch.bool)
    places[:, call.text_tokens :] = True
    return _qwen_image(call, "context_in_dim") | {"img_mask": places.to(call.device)}


def _z_image(call: Call) -> dict[str, Any]:
    """Lists. The second half of a batch has the empty negative prompt, which is shorter."""
    empty = call.batch // 2
    lengths = [call.text_tokens] * (call.batch - empty) + [min(EMPTY_PROMPT_TOKENS, call.text_tokens)] * empty
    return {
        "x": list(call.latents().unsqueeze(2).unbind()),
        "t": call.constant(0.5, call.batch, dtype=torch.float32),
        "cap_feats": [call.noise(length, call.config["cap_feat_dim"]) for length in lengths],
    }


def _krea2(call: Call) -> dict[str, Any]:
    """Several layers of the text encoder. A prompt is padded in the middle, before the end of its template."""
    mask = torch.ones(call.batch, call.text_tokens, dtype=torch.bool)
    mask[:, min(call.text_tokens, PROMPT_TOKENS) : -5] = False
    return _usual(call, "num_text_layers", "text_hidden_dim") | {
        "position_ids": torch.cat([torch.zeros(call.text_tokens, 3), call.grid_ids(3)]).to(call.device),
        "encoder_attention_mask": mask.to(call.device),
    }


def _aura_flow(call: Call) -> dict[str, Any]:
    return _usual(call, "joint_attention_dim", sample=call.latents())


WAN_FRAMES, LTX_FRAMES, H3_FRAMES = FrameGroups(4), FrameGroups(8), FrameGroups(17, 5, 5, 2)
SINGLE_FRAMES = FrameGroups(1)
"""Of an autoencoder of images."""


def _wan(call: Call, groups: FrameGroups = WAN_FRAMES) -> dict[str, Any]:
    """TI2V-5B has a time for every token."""
    per_token = call.config["in_channels"] == TI2V_CHANNELS
    factor = 2 * LATENT_FACTOR if per_token else LATENT_FACTOR
    if call.height % (2 * factor) or call.width % (2 * factor):
        raise UsageError(
            f"resolution '{call.width}x{call.height}' is not allowed: this model takes multiples of {2 * factor}."
        )
    frames, height, width = call.clip_sides(groups, factor)
    tokens = [frames * (height // 2) * (width // 2)] if per_token else []
    return {
        "hidden_states": call.noise(call.batch, call.config["in_channels"], frames, height, width),
        "encoder_hidden_states": call.text("text_dim"),
        "timestep": call.constant(500, call.batch, *tokens, dtype=torch.float32),
    }


def _ltx2(call: Call) -> dict[str, Any]:
    """Video and audio, each with its text."""
    config, batch = call.config, call.batch
    frames, height, width = call.clip_sides(LTX_FRAMES, LTX_FACTOR)
    audio_per_second = config["audio_sampling_rate"] / config["audio_hop_length"] / config["audio_scale_factor"]
    audio = round((call.frames or 0) / FRAME_RATE * audio_per_second)
    return {
        "hidden_states": call.noise(batch, frames * height * width, config["in_channels"]),
        "audio_hidden_states": call.noise(batch, audio, config["audio_in_channels"]),
        "encoder_hidden_states": call.text("caption_channels"),
        "audio_encoder_hidden_states": call.text("caption_channels"),
        "timestep": call.constant(500, batch),
        "sigma": call.constant(500, batch),
        "encoder_attention_mask": call.constant(1, batch, call.text_tokens),
        "audio_encoder_attention_mask": call.constant(1, batch, call.text_tokens),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": FRAME_RATE,
        "audio_num_frames": audio,
    }


def _hunyuan15(call: Call) -> dict[str, Any]:
    """Text to video: most of the text is padding, and so are the tokens of glyphs and of the image."""
    config, batch = call.config, call.batch
    mask = torch.zeros(batch, call.text_tokens)
    mask[:, :PROMPT_TOKENS] = 1
    return {
        "hidden_states": call.noise(batch, config["in_channels"], *call.clip_sides(WAN_FRAMES, HUNYUAN_FACTOR)),
        "timestep": call.constant(500, batch),
        "encoder_hidden_states": call.text("text_embed_dim"),
        "encoder_attention_mask": mask.to(call.device, call.dtype),
        "encoder_hidden_states_2": call.constant(0, batch, GLYPH_TOKENS, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": call.constant(0, batch, GLYPH_TOKENS),
        "image_embeds": call.constant(0, batch, IMAGE_TOKENS, config["image_embed_dim"]),
    }


def _h3(call: Call) -> dict[str, Any]:
    """One sequence of text, audio and video, without given frames."""
    config, batch = call.config, call.batch
    frames, height, width = call.clip_sides(H3_FRAMES, H3_FACTOR)
    audio = round((call.frames or 0) / FRAME_RATE * H3_AUDIO_PER_SECOND)
    lengths = (call.text_tokens, audio * H3_AUDIO_CHANNELS, frames * height * width)
    text, sound, video = torch.arange(sum(lengths), device=call.device).split(lengths)
    tags = torch.zeros(sum(lengths), dtype=torch.int64, device=call.device)
    tags[text], tags[sound] = 1, 2
    channels = config["in_channels"] * config["patch_size"][1] * config["patch_size"][2]
    return {
        "hidden_states": call.noise(batch, lengths[2], channels),
        "audio_hidden_states": call.noise(batch, lengths[1], config["audio_in_channels"]),
        "encoder_hidden_states": call.text("text_dim"),
        "timestep": call.constant(0.5, 1, dtype=torch.float32),
        "timestep_indices": torch.zeros_like(tags),
        "token_tags": tags,
        "position_ids": _h3_positions(call.text_tokens, audio, frames, height, width).to(call.device),
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


@dataclass(frozen=True)
class Family:
    """How the denoisers of a class are called."""

    inputs: Callable[[Call], dict[str, Any]]
    """The keyword arguments of a call."""
    multiple: int
    """Sides of an image must be multiples of this."""
    text_tokens: int
    is_guided: bool = False
    """Whether half of the batch is the unconditional half of classifier-free guidance."""
    frame_groups: FrameGroups | None = None
    """Of a model of clips."""
    sample: str = "hidden_states"
    """The argument that is the noisy image, or a list of such."""


FAMILIES: Mapping[str, Family] = {
    "UNet2DConditionModel": Family(_unet, 8, 77, is_guided=True, sample="sample"),
    "FluxTransformer2DModel": Family(_flux, 16, 512),
    "SD3Transformer2DModel": Family(_sd3, 16, 333, is_guided=True),
    "PixArtTransformer2DModel": Family(_pixart, 16, 300, is_guided=True),
    "Flux2Transformer2DModel": Family(_flux2, 16, 512),
    "Flux3Transformer2DModel": Family(_flux2, 16, 512),
    "ChromaTransformer2DModel": Family(_chroma, 16, 512),
    "QwenImageTransformer2DModel": Family(_qwen_image, 16, PROMPT_TOKENS),
    "QwenImage21Transformer2DModel": Family(_qwen_image21, 32, PROMPT_TOKENS),
    "ZImageTransformer2DModel": Family(_z_image, 16, PROMPT_TOKENS, is_guided=True, sample="x"),
    "Krea2Transformer2DModel": Family(_krea2, 16, 512),
    "AuraFlowTransformer2DModel": Family(_aura_flow, 16, 256, is_guided=True),
    "WanTransformer3DModel": Family(_wan, 16, 512, frame_groups=WAN_FRAMES),
    "LTX2VideoTransformer3DModel": Family(_ltx2, LTX_FACTOR, 1024, is_guided=True, frame_groups=LTX_FRAMES),
    "MiniMaxH3Transformer3DModel": Family(_h3, H3_FACTOR, PROMPT_TOKENS, frame_groups=H3_FRAMES),
    "HunyuanVideo15Transformer3DModel": Family(_hunyuan15, HUNYUAN_FACTOR, 1000, frame_groups=WAN_FRAMES),
}
"""By the name of the model class."""
PIPELINES: Mapping[str, Family] = {
    "DemoWanPipeline": Family(partial(_wan, groups=SINGLE_FRAMES), 16, 32, frame_groups=SINGLE_FRAMES)
}
"""By the name of the pipeline class, where it calls the model differently from others of its class."""
