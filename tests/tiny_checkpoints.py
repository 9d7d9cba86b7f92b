"""Tiny SDXL and Flux pipelines, complete with text encoders, as folders that `from_pretrained` opens. Built offline."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    StableDiffusionXLPipeline,
)
from tiny import flux_transformer, sdxl_unet
from tiny_pipelines import BETAS, vae
from tiny_text import PROMPTS, pipeline_folder
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from training import tokenizer as tokenizers

WIDTH = 32
"""Of every text encoder."""
TEXT_TOKENS = 16
VOCABULARY = 600


@cache
def checkpoint(family: str) -> Path:
    """The folder of a pipeline: `sd15`, `sdxl` or `flux`. Written once per session."""
    if family == "sd15":
        return pipeline_folder()
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{family}-"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        {"sdxl": _sdxl, "flux": _flux}[family]().save_pretrained(folder)
    return folder


def _sdxl() -> DiffusionPipeline:
    """384×384 pixels; 576 tokens at its only level with attention, enough for the preset `toma-late`."""
    return StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=CLIPTextModel(_clip_config()),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config()),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=sdxl_unet(sample_size=48),
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
        add_watermarker=False,
    )


def _flux() -> DiffusionPipeline:
    """Six blocks of each kind: the first five of each are not merged. Its default size is 1024×1024 pixels."""
    tokenizer = T5TokenizerFast()
    config = T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return FluxPipeline(
        vae=vae(latent_channels=1),
        text_encoder=CLIPTextModel(_clip_config()),
        text_encoder_2=T5EncoderModel(config),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=tokenizer,
        transformer=flux_transformer(num_layers=6, num_single_layers=6),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


@cache
def _clip_tokenizer() -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return tokenizers.train(PROMPTS, VOCABULARY, TEXT_TOKENS, Path(folder))


def _clip_config() -> CLIPTextConfig:
    tokenizer = _clip_tokenizer()
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
