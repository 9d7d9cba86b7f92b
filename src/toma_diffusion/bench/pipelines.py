"""What stands around a denoiser: text encoders before it, the decoder after it. To time a whole image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from toma_diffusion.bench.inputs import LATENT_FACTOR
from toma_diffusion.bench.models import Denoiser, build_empty, fill
from toma_diffusion.bench.scenario import Group

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


ENCODERS: Mapping[str, tuple[Encoder, ...]] = {
    "sdxl": (CLIP_L_ENCODER, CLIP_BIG_G_ENCODER),
    "sd15": (CLIP_L_ENCODER,),
    "flux": (CLIP_L_ENCODER, _t5(512)),
    "sd35": (CLIP_L_PROJECTED, CLIP_BIG_G_ENCODER, _t5(256)),
}
"""By the model's name: class, class of its configuration, the published one, a small one, tokens of a prompt."""

VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
SMALL_VAE = {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
LATENTS_OF_16_CHANNELS = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
VAES: Mapping[str, Mapping[str, Any]] = {
    "sdxl": {"latent_channels": 4},
    "sd15": {"latent_channels": 4},
    "flux": LATENTS_OF_16_CHANNELS,
    "sd35": LATENTS_OF_16_CHANNELS,
}
UPCAST = ("sdxl",)
"""Models whose decoder overflows in half precision; their pipeline runs it in single precision, so we do."""


class EndToEnd(Protocol):
    """Makes a whole image around the denoiser's steps."""

    def image(self, group: Group, run: Callable[[], object]) -> None:
        """From the prompt to the pixels; `run` makes the denoiser's steps."""


class RandomParts:
    """Text encoders and decoder of a model known by name, at its published size or smaller, with random weights."""

    def __init__(self, name: str, denoiser: Denoiser, *, small: bool) -> None:
        self.denoiser = denoiser
        self.encoders = [(self._encoder(encoder, small), encoder[-1]) for encoder in ENCODERS[name]]
        self.vae: Any = build_empty("AutoencoderKL", {**VAE, **VAES[name], **(SMALL_VAE if small else {})})
        self.vae_dtype = torch.float32 if name in UPCAST else denoiser.dtype
        fill(self.vae, denoiser.device, self.vae_dtype)

    def image(self, group: Group, run: Callable[[], object]) -> None:
        """Encode random prompts, make the steps, decode random latents."""
        images = images_of(self.denoiser, group.batch)
        device = self.denoiser.device
        with torch.no_grad():
            for encoder, tokens in self.encoders:
                encoder(torch.randint(1000, (group.batch, tokens), device=device))
            run()
            size = (group.resolution.height // LATENT_FACTOR, group.resolution.width // LATENT_FACTOR)
            channels = self.vae.config.latent_channels
            self.vae.decode(torch.randn(images, channels, *size, device=device, dtype=self.vae_dtype))

    def _encoder(self, encoder: Encoder, small: bool) -> nn.Module:
        try:
            import transformers
        except ImportError as error:
            raise ValueError("--pipeline needs the package transformers for the text encoders: install it.") from error

        class_name, config_name, published, shrunk, _ = encoder
        config = getattr(transformers, config_name)(**(shrunk if small else published))
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, class_name)(config)
        fill(model.eval().requires_grad_(False), self.denoiser.device, self.denoiser.dtype)
        return model


class LoadedParts:
    """The pipeline that the denoiser was loaded with."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.pipeline = denoiser.pipeline.to(denoiser.device)
        self.pipeline.set_progress_bar_config(disable=True)

    def image(self, group: Group, run: Callable[[], object]) -> None:
        """Call the pipeline with a prompt. It makes the steps itself."""
        self.pipeline(
            prompt="a photograph of an astronaut riding a horse",
            num_inference_steps=group.steps,
            height=group.resolution.height,
            width=group.resolution.width,
            num_images_per_prompt=images_of(self.denoiser, group.batch),
        )


def images_of(denoiser: Denoiser, batch: int) -> int:
    """How many images a batch makes."""
    return max(1, batch // 2) if denoiser.family.is_guided else batch
