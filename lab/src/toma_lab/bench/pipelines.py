"""Whole pipelines around a denoiser, with text encoders and decoder, to time an image end to end."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toma_diffusion.errors import UsageError
from toma_lab.bench.models import Denoiser
from toma_lab.bench.scenario import Group
from toma_lab.bench.weights import build_empty, empty, fill

CLIP_TOKENS = 77
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_BIG_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
SMALL_CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
SMALL_T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 1, "feed_forward_proj": "gated-gelu"}

Encoder = tuple[str, str, Mapping[str, Any], Mapping[str, Any], int]
CLIP_L_ENCODER: Encoder = ("CLIPTextModel", "CLIPTextConfig", CLIP_L, SMALL_CLIP, CLIP_TOKENS)
CLIP_L_PROJECTED: Encoder = ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP_L, SMALL_CLIP, CLIP_TOKENS)
CLIP_BIG_G_ENCODER: Encoder = ("CLIPTextModelWithProjection", "CLIPTextConfig", CLIP_BIG_G, SMALL_CLIP, CLIP_TOKENS)


def _t5(tokens: int) -> Encoder:
    return ("T5EncoderModel", "T5Config", T5_XXL, SMALL_T5, tokens)


VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
SMALL_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
LATENTS_OF_16_CHANNELS = {
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}
DIFFUSION_STEPS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@dataclass(frozen=True)
class Surroundings:
    """The rest of the published pipeline of a model that is known by name."""

    class_name: str
    """Of the diffusers pipeline."""
    denoiser: str
    encoders: tuple[Encoder, ...]
    vae: Mapping[str, Any]
    scheduler: str
    scheduler_config: Mapping[str, Any]
    guidance: float


SURROUNDINGS: Mapping[str, Surroundings] = {
    "sdxl": Surroundings(
        "StableDiffusionXLPipeline",
        "unet",
        (CLIP_L_ENCODER, CLIP_BIG_G_ENCODER),
        {"latent_channels": 4, "force_upcast": True},  # its decoder overflows in half precision
        "EulerDiscreteScheduler",
        {**DIFFUSION_STEPS, "steps_offset": 1, "timestep_spacing": "leading"},
        5.0,
    ),
    "sd15": Surroundings(
        "StableDiffusionPipeline",
        "unet",
        (CLIP_L_ENCODER,),
        {"latent_channels": 4},
        "DDIMScheduler",
        {**DIFFUSION_STEPS, "steps_offset": 1, "clip_sample": False},
        7.5,
    ),
    "flux": Surroundings(
        "FluxPipeline",
        "transformer",
        (CLIP_L_ENCODER, _t5(512)),
        LATENTS_OF_16_CHANNELS,
        "FlowMatchEulerDiscreteScheduler",
        {"use_dynamic_shifting": True},
        3.5,
    ),
    "sd35": Surroundings(
        "StableDiffusion3Pipeline",
        "transformer",
        (CLIP_L_PROJECTED, CLIP_BIG_G_ENCODER, _t5(256)),
        LATENTS_OF_16_CHANNELS,
        "FlowMatchEulerDiscreteScheduler",
        {"shift": 3.0},
        4.5,
    ),
}
"""By the model's name."""


def check_surroundings(name: str) -> None:
    """Raise `UsageError` if no more than the denoiser of this model is known."""
    if name not in SURROUNDINGS:
        raise UsageError(
            f"--pipeline does not know the text encoders and the decoder of model {name!r}: leave it out, use one of "
            f"{', '.join(SURROUNDINGS)}, or give a folder with a whole pipeline."
        )


class EndToEnd(Protocol):
    """Generates a whole image, from the prompt to the pixels."""

    def image(self, group: Group) -> None:
        """Generate one."""


class RandomPipeline:
    """The diffusers pipeline of a model known by name, at its published size or smaller, with random weights.

    Prompts are random token ids. They go through the text encoders, whose time counts; the pipeline itself gets random
    embeddings, because random encoders make numbers that overflow.
    """

    def __init__(self, name: str, denoiser: Denoiser, *, small: bool) -> None:
        import diffusers

        around = SURROUNDINGS[name]
        self.denoiser = denoiser
        self.guidance = around.guidance
        self.encoders = [(self._encoder(encoder, small), encoder[-1]) for encoder in around.encoders]
        vae = build_empty("AutoencoderKL", {**VAE, **around.vae, **(SMALL_VAE if small else {})})
        fill(vae, denoiser.device, denoiser.dtype)
        scheduler = getattr(diffusers, around.scheduler)(**around.scheduler_config)
        pipeline_class: Any = getattr(diffusers, around.class_name)
        parts: dict[str, Any] = {around.denoiser: denoiser.model, "vae": vae, "scheduler": scheduler}
        expected = list(inspect.signature(pipeline_class.__init__).parameters.values())[1:]
        parts |= {each.name: None for each in expected if each.default is each.empty and each.name not in parts}
        if any(each.name == "requires_safety_checker" for each in expected):
            parts["requires_safety_checker"] = False
        self.pipeline = pipeline_class(**parts)
        self.pipeline.set_progress_bar_config(disable=True)

    def image(self, group: Group) -> None:
        """Encode random prompts, and call the pipeline, which makes the steps and decodes."""
        images, device = images_of(self.denoiser, group.batch), self.denoiser.device
        with torch.no_grad():
            for encoder, tokens in self.encoders:
                encoder(torch.randint(1000, (group.batch, tokens), device=device))
        self.pipeline(
            **self._embeddings(group, images),
            guidance_scale=self.guidance,
            num_inference_steps=group.steps,
            height=group.resolution.height,
            width=group.resolution.width,
            output_type="pt",
        )

    def _embeddings(self, group: Group, images: int) -> dict[str, Tensor]:
        inputs = self.denoiser.inputs(images, group.resolution.width, group.resolution.height)
        found = {"prompt_embeds": inputs["encoder_hidden_states"]}
        pooled = inputs.get("pooled_projections", inputs.get("added_cond_kwargs", {}).get("text_embeds"))
        if pooled is not None:
            found["pooled_prompt_embeds"] = pooled
        if self.denoiser.family.is_guided:
            found |= {f"negative_{name}": tensor.neg() for name, tensor in found.items()}
        return found

    def _encoder(self, encoder: Encoder, small: bool) -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise UsageError("--pipeline needs the package transformers for the text encoders: install it.") from error

        class_name, config_name, published, shrunk, _ = encoder
        config = getattr(transformers, config_name)(**(shrunk if small else published))
        model = empty(lambda: getattr(transformers, class_name)(config))
        fill(model, self.denoiser.device, self.denoiser.dtype)
        return model


class LoadedPipeline:
    """The pipeline that the denoiser was loaded with."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.pipeline = denoiser.pipeline.to(denoiser.device)
        self.pipeline.set_progress_bar_config(disable=True)

    def image(self, group: Group) -> None:
        """Call the pipeline with a prompt. Of a model of clips, a clip."""
        count = images_of(self.denoiser, group.batch)
        self.pipeline(
            prompt="a photograph of an astronaut riding a horse",
            num_inference_steps=group.steps,
            height=group.resolution.height,
            width=group.resolution.width,
            **(
                {"num_images_per_prompt": count}
                if group.frames is None
                else {"num_videos_per_prompt": count, "num_frames": group.frames}
            ),
        )


def images_of(denoiser: Denoiser, batch: int) -> int:
    """How many images a batch makes."""
    return max(1, batch // 2) if denoiser.family.is_guided else batch
