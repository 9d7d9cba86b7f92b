"""Real diffusers pipelines around the tiny video models, without text encoders and autoencoders."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from tiny_pipelines import quiet
from tiny_video import TEXT_TOKENS, TEXT_WIDTH, build

WITHOUT = dict.fromkeys(("vae", "text_encoder", "tokenizer"))


def wan_pipeline(experts: int = 1, **changes) -> DiffusionPipeline:
    """Wan 2.1; with two experts Wan 2.2, whose second takes over at half of the noise."""
    models = [build("WanTransformer3DModel")() for _ in range(experts)]
    if experts == 2:
        models[1].proj_out.weight.mul_(0.5)
        changes |= {"transformer_2": models[1], "boundary_ratio": 0.5}
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=1.0
    )
    return quiet(diffusers.WanPipeline(**WITHOUT, transformer=models[0], scheduler=scheduler, **changes))


def hunyuan_pipeline() -> DiffusionPipeline:
    return quiet(
        diffusers.HunyuanVideoPipeline(
            **WITHOUT,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=build("HunyuanVideoTransformer3DModel")(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        )
    )


def cogvideox_pipeline() -> DiffusionPipeline:
    transformer = build("CogVideoXTransformer3DModel")()
    return quiet(
        diffusers.CogVideoXPipeline(**WITHOUT, transformer=transformer, scheduler=diffusers.CogVideoXDDIMScheduler())
    )


def mochi_pipeline() -> DiffusionPipeline:
    return quiet(
        diffusers.MochiPipeline(
            **WITHOUT,
            transformer=build("MochiTransformer3DModel")(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        )
    )


PIPELINES = {
    "wan": wan_pipeline,
    "hunyuan": hunyuan_pipeline,
    "cogvideox": cogvideox_pipeline,
    "mochi": mochi_pipeline,
}
FRAMES = {"MochiPipeline": 19}
"""Pixel frames that make 4 of the latent. 13 for the others."""


def prompts(pipe: DiffusionPipeline, seed: int) -> dict:
    """Random prompts, also negative ones, as this pipeline takes them."""
    generator = torch.Generator().manual_seed(seed)
    name, mask = type(pipe).__name__, torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    width = 64 if name == "MochiPipeline" else TEXT_WIDTH
    embeds = {f"{which}prompt_embeds": torch.randn(1, TEXT_TOKENS, width, generator=generator) for which in WHICH}
    if name == "HunyuanVideoPipeline":
        embeds |= {f"{which}pooled_prompt_embeds": torch.randn(1, 8, generator=generator) for which in WHICH}
        embeds |= {"true_cfg_scale": 2.0}
    if name in ("HunyuanVideoPipeline", "MochiPipeline"):
        embeds |= {f"{which}prompt_attention_mask": mask for which in WHICH}
    return embeds


WHICH = ("", "negative_")


def generate(pipe: DiffusionPipeline, steps: int = 4, seed: int = 0, **arguments) -> torch.Tensor:
    """Latents of 4 frames of 8×8, which are 4×4 tokens each."""
    settings = {
        "height": 64,
        "width": 64,
        "num_frames": FRAMES.get(type(pipe).__name__, 13),
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
    }
    return pipe(**settings | prompts(pipe, seed) | arguments, return_dict=False)[0]


def pipeline(name: str) -> DiffusionPipeline:
    try:
        return PIPELINES[name]()
    except AttributeError as missing:
        pytest.skip(f"this diffusers has no {missing.name}")
