"""Loads the models that are stored in a form of their own. Needs torch and diffusers, which this package does not
install."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from toma_diffusion_demo import flux_folder, four_step_folder, model_folder

WEIGHTS = "weights_8bit.safetensors"
"""The transformer's weights: matrices as whole numbers from -127 to 127, with a scale for each row."""
SCALE = ".scale"
"""What the name of a matrix' scales ends with."""
LOW_RANK_WEIGHTS = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for."""
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


def load_transformer(folder: Path, dtype: torch.dtype) -> FluxTransformer2DModel:
    """The denoiser."""
    transformer = FluxTransformer2DModel.from_config(json.loads((folder / "config.json").read_text()))
    transformer.load_state_dict(dequantised(load_file(folder / WEIGHTS)))
    return transformer.type(dtype).eval()


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
