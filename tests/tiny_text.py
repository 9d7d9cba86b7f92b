"""A whole text-to-image pipeline, tokenizer and all, built offline: the bundled model in small, untrained."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

from training import tokenizer as tokenizers
from training.models import build_scheduler, build_text_encoder, build_unet, build_vae
from training.settings import TINY

PROMPTS = ("a red apple", "a blue shoe", "a green tree")


@cache
def pipeline_folder() -> Path:
    """Written once a session, as a user would find it."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-pipeline-"))
    text_pipeline().save_pretrained(folder / "pipeline")
    return folder / "pipeline"


def text_pipeline() -> StableDiffusionPipeline:
    """64×64 pixels; 64 tokens at its first level, 16 at its second."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizers.train(PROMPTS, TINY.vocabulary, TINY.text_tokens, Path(folder))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = StableDiffusionPipeline(
            vae=build_vae(TINY),
            text_encoder=build_text_encoder(TINY, tokenizer),
            tokenizer=tokenizer,
            unet=build_unet(TINY),
            scheduler=build_scheduler(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe
