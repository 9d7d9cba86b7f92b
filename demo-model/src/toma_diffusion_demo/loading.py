"""Loads the models that are stored in a form of their own. Needs torch and diffusers, which this package does not
install."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.configuration_utils import FrozenDict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from toma_diffusion_demo import flux_folder, four_step_folder, model_folder, video_folder

WEIGHTS = "weights_8bit.safetensors"
"""The transformer's weights: matrices as whole numbers from -127 to 127, with a scale for each row."""
SCALE = ".scale"
"""What the name of a matrix' scales ends with."""
LOW_RANK_WEIGHTS = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for."""
FRAMES_AT_ONCE = 16
"""That are decoded together."""
COUNTED_FRAMES = 2
"""WanPipeline makes 1 + n latent frames for 1 + n · factor frames, and corrects all other numbers. With a factor of 1,
that of an autoencoder of images, it finds every number wrong: it is told another."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""What the names of the two low-rank factors of a layer end with."""


class DemoFluxPipeline(FluxPipeline):  # type: ignore[misc]  # diffusers shows a type checker no classes
    """FluxPipeline with one text encoder in place of two: CLIP's tokens are the sequence, its pooled output as ever."""

    def encode_prompt(
        self,
        prompt: str | list[str],
        prompt_2: str | list[str] | None = None,
        device: torch.device | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        max_sequence_length: int = 512,
        lora_scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence, the pooled text and the positions of the text. There is no second prompt."""
        device = device or self._execution_device
        if prompt_embeds is None or pooled_prompt_embeds is None:
            tokens = self.tokenizer(
                [prompt] if isinstance(prompt, str) else prompt,
                padding="max_length",
                max_length=self.tokenizer_max_length,
                truncation=True,
                return_tensors="pt",
            )
            text = self.text_encoder(tokens.input_ids.to(device))
            prompt_embeds = text.last_hidden_state.repeat_interleave(num_images_per_prompt, dim=0)
            pooled_prompt_embeds = text.pooler_output.repeat_interleave(num_images_per_prompt, dim=0)
        positions = torch.zeros(prompt_embeds.shape[1], 3, device=device, dtype=prompt_embeds.dtype)
        return prompt_embeds, pooled_prompt_embeds, positions


def dequantised(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as a network takes them, in single precision."""
    return {
        name: tensor.float() * stored[name + SCALE].float()[:, None] if name + SCALE in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def load_transformer(folder: Path, dtype: torch.dtype) -> Any:
    """The denoiser, of the class that its configuration names. What diffusers keeps in single precision stays in it."""
    config = json.loads((folder / "config.json").read_text())
    transformer = getattr(diffusers, config["_class_name"]).from_config(config)
    transformer.load_state_dict(dequantised(load_file(folder / WEIGHTS)))
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, tensor in (*transformer.named_parameters(), *transformer.named_buffers()):
        if tensor.is_floating_point() and not kept.intersection(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return transformer.eval()


def build_flux_pipeline(
    transformer: FluxTransformer2DModel, vae: AutoencoderKL, scheduler: FlowMatchEulerDiscreteScheduler, text: Path
) -> DemoFluxPipeline:
    """A pipeline of these parts, with the text encoder and tokenizer of the pipeline in the folder `text`."""
    encoder = CLIPTextModel.from_pretrained(text / "text_encoder", local_files_only=True)
    pipe = DemoFluxPipeline(
        scheduler=scheduler,
        vae=vae,
        text_encoder=encoder.to(transformer.dtype),
        tokenizer=CLIPTokenizer.from_pretrained(text / "tokenizer", local_files_only=True),
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipe.default_sample_size = vae.config.sample_size // pipe.vae_scale_factor
    return pipe


def flux_pipeline(
    dtype: torch.dtype = torch.bfloat16, folder: Path | None = None, text: Path | None = None
) -> DemoFluxPipeline:
    """The Flux-class model. Another `folder` of such a model, and another pipeline `text` to read prompts with, may be
    given."""
    folder = folder or flux_folder()
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype, local_files_only=True)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
    return build_flux_pipeline(load_transformer(folder / "transformer", dtype), vae, scheduler, text or model_folder())


@torch.no_grad()
def add_low_rank(network: nn.Module, weights: dict[str, Tensor], prefix: str) -> None:
    """Add low-rank weights, named as diffusers names them, to those of a network for good. What `load_lora_weights`
    and `fuse_lora` of diffusers do, without the package peft, which they need."""
    for name, down in weights.items():
        if name.endswith(DOWN):
            layer = name.removeprefix(prefix).removesuffix(DOWN)
            up = weights[f"{prefix}{layer}{UP}"].float().flatten(1)
            weight = network.get_submodule(layer).get_parameter("weight")
            weight.copy_(weight.float() + (up @ down.float().flatten(1)).view_as(weight))


def four_step_pipeline(
    dtype: torch.dtype = torch.float16, folder: Path | None = None, model: Path | None = None
) -> StableDiffusionPipeline:
    """The demo model for four steps without guidance. Another `folder` of such weights, and another pipeline `model` to
    add them to, may be given."""
    pipe = StableDiffusionPipeline.from_pretrained(model or model_folder(), torch_dtype=dtype, local_files_only=True)
    add_low_rank(pipe.unet, load_file((folder or four_step_folder()) / LOW_RANK_WEIGHTS), "unet.")
    return pipe


class FrameAutoencoder(nn.Module):
    """An autoencoder of images for clips, frame by frame, with what WanPipeline asks of one of videos."""

    def __init__(self, images: AutoencoderKL) -> None:
        super().__init__()
        self.images = images
        channels = images.config.latent_channels
        self.config = FrozenDict(
            z_dim=channels,
            latents_mean=(0.0,) * channels,
            latents_std=(1.0,) * channels,
            scale_factor_temporal=1,
            scale_factor_spatial=2 ** (len(images.config.block_out_channels) - 1),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        dtype: torch.dtype = self.images.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.images.device
        return device

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Frames of latents, [clips, channels, frames, height, width] to [clips, 3, frames, …], a few at a time."""
        each = (latents / self.images.config.scaling_factor).transpose(1, 2).flatten(0, 1).split(FRAMES_AT_ONCE)
        frames = torch.cat([self.images.decode(some, return_dict=False)[0] for some in each])
        return (frames.unflatten(0, (latents.shape[0], latents.shape[2])).transpose(1, 2),)


class DemoWanPipeline(WanPipeline):  # type: ignore[misc]  # as above
    """WanPipeline with CLIP's tokens as its text, and an autoencoder that knows images alone."""

    def _get_t5_prompt_embeds(
        self,
        prompt: str | list[str],
        num_videos_per_prompt: int = 1,
        max_sequence_length: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As in training: all tokens that the text encoder has, the padding as it makes it."""
        tokens = self.tokenizer(
            [prompt] if isinstance(prompt, str) else prompt,
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        text = self.text_encoder(tokens.input_ids.to(device or self._execution_device)).last_hidden_state
        embeds: Tensor = text.repeat_interleave(num_videos_per_prompt, dim=0)
        return embeds if dtype is None else embeds.to(dtype)

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int = 256,
        width: int = 256,
        num_frames: int = 16,
        num_inference_steps: int = 20,
        guidance_scale: float = 4.0,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        callback_on_step_end: Callable[..., dict[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> Any:
        """What WanPipeline does, with the sizes, steps and guidance of this model as defaults."""
        return super().__call__(
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_frames=1 + COUNTED_FRAMES * (num_frames - 1),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            num_videos_per_prompt=num_videos_per_prompt,
            generator=generator,
            latents=latents,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            output_type=output_type,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs or ["latents"],
        )


def build_wan_pipeline(
    transformer: WanTransformer3DModel, vae: AutoencoderKL, scheduler: FlowMatchEulerDiscreteScheduler, text: Path
) -> DemoWanPipeline:
    """A pipeline of these parts, with the text encoder and tokenizer of the pipeline in the folder `text`."""
    encoder = CLIPTextModel.from_pretrained(text / "text_encoder", local_files_only=True)
    pipe = DemoWanPipeline(
        tokenizer=CLIPTokenizer.from_pretrained(text / "tokenizer", local_files_only=True),
        text_encoder=encoder.to(transformer.dtype),
        vae=FrameAutoencoder(vae),
        scheduler=scheduler,
        transformer=transformer,
    )
    pipe.vae_scale_factor_temporal = COUNTED_FRAMES
    return pipe


def wan_pipeline(
    folder: Path | None = None, dtype: torch.dtype = torch.bfloat16, text: Path | None = None
) -> DemoWanPipeline:
    """The video model. Another `folder` of such a model, and another pipeline `text` to read prompts with, may be
    given."""
    folder = folder or video_folder()
    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=dtype, local_files_only=True)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler", local_files_only=True)
    return build_wan_pipeline(load_transformer(folder / "transformer", dtype), vae, scheduler, text or model_folder())
