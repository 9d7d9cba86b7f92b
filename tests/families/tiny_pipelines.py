"""Real diffusers pipelines around the tiny models: no text encoders, prompts are given as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from tiny import flux_transformer, pixart_transformer, sd3_transformer, sd15_unet, sdxl_unet, seeded

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def vae(**changes) -> AutoencoderKL:
    """Eight pixels a latent, as the real ones."""
    settings = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 128,
        "shift_factor": 0.0,
    }
    return seeded(lambda: AutoencoderKL(**settings | changes))


def sd15_pipeline(unet: Any = None, pipeline_class: type = StableDiffusionPipeline) -> DiffusionPipeline:
    return quiet(
        pipeline_class(
            vae=vae(),
            text_encoder=None,
            tokenizer=None,
            unet=unet or sd15_unet(),
            scheduler=DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


def inpainting_pipeline() -> DiffusionPipeline:
    return sd15_pipeline(sd15_unet(in_channels=9), StableDiffusionInpaintPipeline)


def sdxl_pipeline() -> DiffusionPipeline:
    return quiet(
        StableDiffusionXLPipeline(
            vae=vae(),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=sdxl_unet(),
            scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
            add_watermarker=False,
        )
    )


def flux_pipeline() -> DiffusionPipeline:
    return quiet(
        FluxPipeline(
            vae=vae(latent_channels=1),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            transformer=flux_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    )


def sd3_pipeline() -> DiffusionPipeline:
    return quiet(
        StableDiffusion3Pipeline(
            vae=vae(),
            text_encoder=None,
            text_encoder_2=None,
            text_encoder_3=None,
            tokenizer=None,
            tokenizer_2=None,
            tokenizer_3=None,
            transformer=sd3_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    )


def pixart_pipeline() -> DiffusionPipeline:
    return quiet(
        PixArtAlphaPipeline(
            vae=vae(),
            text_encoder=None,
            tokenizer=None,
            transformer=pixart_transformer(),
            scheduler=DPMSolverMultistepScheduler(),
        )
    )


PIPELINES = {
    "sd15": sd15_pipeline,
    "sdxl": sdxl_pipeline,
    "flux": flux_pipeline,
    "sd3": sd3_pipeline,
    "pixart": pixart_pipeline,
}


def quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoiser(pipe: DiffusionPipeline) -> torch.nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def embeds(pipe: DiffusionPipeline, prompts: int = 1, seed: int = 0) -> dict[str, Any]:
    """Random prompts and negative prompts, as the arguments and of the widths that this pipeline takes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(prompts, *shape, generator=generator)

    config = denoiser(pipe).config
    name = type(pipe).__name__
    if name.startswith("PixArt"):
        masks = {f"{which}prompt_attention_mask": torch.ones(prompts, 6) for which in ("", "negative_")}
        width, pooled = config.caption_channels, None
        extra = masks | {"negative_prompt": None, "use_resolution_binning": False}
    elif name.startswith(("Flux", "StableDiffusion3")):
        width, pooled, extra = config.joint_attention_dim, config.pooled_projection_dim, {}
    elif name.startswith("StableDiffusionXL"):
        width, pooled, extra = config.cross_attention_dim, 32, {}
    else:
        width, pooled, extra = config.cross_attention_dim, None, {}
    arguments = {"prompt_embeds": random(6, width), "negative_prompt_embeds": random(6, width), **extra}
    if pooled is not None:
        arguments |= {"pooled_prompt_embeds": random(pooled), "negative_pooled_prompt_embeds": random(pooled)}
    return arguments


def run(pipe: DiffusionPipeline, prompts: int = 1, seed: int = 0, **arguments: Any) -> torch.Tensor:
    """One generation: the same arguments always mean the same noise and the same prompts."""
    settings: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"}
    if "image" not in arguments or "Flux" in type(pipe).__name__:  # the others take the image's size
        settings |= {"height": 128, "width": 128}
    settings |= embeds(pipe, prompts, seed) | {"generator": torch.Generator().manual_seed(seed)}
    return pipe(**settings | arguments, return_dict=False)[0]
