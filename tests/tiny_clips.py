"""Clips without a model; and tiny pipelines of Wan, text to video, image to video, and with two denoisers, complete, as
folders."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image
from toma_lab.pipelines.clips import Clip
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

WIDTH, LATENTS = 32, 4
SIZE = (64, 48)
"""Width and height that tests ask for: 4×3 tokens a latent frame."""
FRAMES = 9
"""Three latent frames."""


def array(clip: Clip) -> np.ndarray:
    """[frames, height, width, 3]."""
    return np.stack([np.asarray(frame) for frame in clip.frames])


def moving(frames: int = 6, size: tuple[int, int] = (33, 24), color: tuple[int, int, int] = (250, 220, 30)) -> Clip:
    """A bright square that goes to the right, on grey noise."""
    noise = np.random.default_rng(0).integers(100, size=(size[1], size[0], 1), dtype=np.uint8).repeat(3, axis=2)
    found = []
    for number in range(frames):
        pixels = noise.copy()
        pixels[4:12, 3 * number : 3 * number + 8] = color
        found.append(Image.fromarray(pixels))
    return Clip(tuple(found), 12.0)


def clip_folder(kind: str = "text") -> Path:
    """The folder of a pipeline that begins with a `text` or an `image`; of `two`, like Wan 2.2."""
    return _written(kind)


@cache
def _written(kind: str) -> Path:
    """Once per session."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-wan-{kind}-"))
    clip_pipeline(kind).save_pretrained(folder)
    return folder


def clip_pipeline(kind: str = "text") -> DiffusionPipeline:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = {
            "tokenizer": T5TokenizerFast(),
            "text_encoder": _text_encoder(),
            "vae": _vae(),
            "scheduler": UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
        }
        if kind == "text":
            pipe = WanPipeline(**parts, transformer=_transformer(LATENTS))
        elif kind == "two":  # of 4 steps, the first two have more noise
            experts = {"transformer": _transformer(LATENTS), "transformer_2": _transformer(LATENTS)}
            pipe = WanPipeline(**parts, **experts, boundary_ratio=0.875)
        else:  # noise, the image's latents, and a mask of the four frames of a latent one
            pipe = WanImageToVideoPipeline(
                **parts, transformer=_transformer(2 * LATENTS + 4), image_encoder=None, image_processor=None
            )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _transformer(in_channels: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=in_channels,
        out_channels=LATENTS,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=64,
        num_layers=3,
    )


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENTS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * LATENTS,
        latents_std=[1.0] * LATENTS,
    )


def _text_encoder() -> UMT5EncoderModel:
    vocabulary = len(T5TokenizerFast())
    return UMT5EncoderModel(
        UMT5Config(vocab_size=vocabulary, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )
