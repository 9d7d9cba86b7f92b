"""Real diffusers pipelines around tiny models of the newest families. Prompts are given as embeddings, and latents come
out: so most need neither a text encoder nor an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image
from tiny import seeded
from tiny_pipelines import quiet
from tiny_today import TEXT_TOKENS, TEXT_WIDTH, TODAY, missing, random

MODELS = {family.name: family for family in TODAY}
SIZE = 128
"""Pixels: 8×8 tokens."""


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline, and how to ask it for a picture."""

    name: str
    family: str
    """Of its denoiser."""
    class_name: str
    prompt: Callable[[int, str], dict[str, Any]]
    """Prompts, so many and with that prefix (`negative_`), as the pipeline takes them."""
    guided: dict[str, Any] = field(default_factory=dict, hash=False)
    """Switches guidance on, for pipelines that can have it."""
    plain: dict[str, Any] = field(default_factory=dict, hash=False)
    """Switches it off."""
    batched: bool = False
    """Whether both prompts of guidance are one batch, not two calls."""
    parts: Callable[[], dict[str, Any]] = dict
    """Further parts of the pipeline."""
    extra: Callable[[], dict[str, Any]] = dict
    """Further arguments of a call."""
    shifts: bool = True
    """Whether its scheduler shifts times by the size of the picture."""

    @property
    def missing(self) -> str:
        return missing(self.class_name)

    def build(self) -> DiffusionPipeline:
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=self.shifts)
        parts = {"vae": None, "text_encoder": None} | self.parts()
        parts |= {} if self.family == "qwen-image-21" else {"tokenizer": None}
        transformer = MODELS[self.family].build()
        return quiet(getattr(diffusers, self.class_name)(scheduler=scheduler, transformer=transformer, **parts))

    def run(
        self, pipe: DiffusionPipeline, steps: int, guided: bool = False, prompts: int = 1, **more: Any
    ) -> torch.Tensor:
        """One generation: the same arguments always mean the same noise and the same prompts."""
        arguments: dict[str, Any] = {"height": SIZE, "width": SIZE, "num_inference_steps": steps}
        arguments |= {"output_type": "latent", "return_dict": False, "generator": torch.Generator().manual_seed(0)}
        arguments |= self.prompt(prompts, "") | self.extra() | (self.guided if guided else self.plain)
        if guided:
            arguments |= self.prompt(prompts, "negative_")
        return pipe(**arguments | more)[0]

    def calls(self, steps: list[int], guided: bool) -> list[int]:
        """The calls of the denoiser that make these steps."""
        passes = 2 if guided and not self.batched else 1
        return [step * passes + index for step in steps for index in range(passes)]


def text(count: int, prefix: str, *between: int) -> torch.Tensor:
    return random(count, TEXT_TOKENS, *between, TEXT_WIDTH, seed=5 + len(prefix))


def embeds(count: int, prefix: str) -> dict[str, Any]:
    return {f"{prefix}prompt_embeds": text(count, prefix)}


def with_mask(name: str, dtype: torch.dtype = torch.bool) -> Callable[[int, str], dict[str, Any]]:
    """The last of the tokens are padding."""

    def prompt(count: int, prefix: str) -> dict[str, Any]:
        mask = torch.ones(count, TEXT_TOKENS, dtype=dtype)
        mask[:, -2:] = 0
        return embeds(count, prefix) | {f"{prefix}{name}": mask}

    return prompt


def layers(count: int, prefix: str) -> dict[str, Any]:
    """Krea 2 takes several layers of its text encoder."""
    return {
        f"{prefix}prompt_embeds": text(count, prefix, 2),
        f"{prefix}prompt_embeds_mask": torch.ones(count, TEXT_TOKENS, dtype=torch.bool),
    }


def captions(count: int, prefix: str) -> dict[str, Any]:
    """Of different lengths."""
    return {f"{prefix}prompt_embeds": [random(5 + 7 * index + len(prefix), TEXT_WIDTH) for index in range(count)]}


def flux2_parts() -> dict[str, Any]:
    settings = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 2,
    }
    return {"vae": seeded(lambda: diffusers.AutoencoderKLFlux2(**settings))}


def edit_parts() -> dict[str, Any]:
    """32 pixels a latent: the pipeline makes every given picture one of 1024×1024."""
    settings = {"base_dim": 2, "z_dim": 2, "dim_mult": [1] * 6, "num_res_blocks": 0, "temperal_downsample": [False] * 5}
    statistics = {"latents_mean": [0.0] * 2, "latents_std": [1.0] * 2}
    return {"vae": seeded(lambda: diffusers.AutoencoderKLQwenImage(**settings | statistics)), "processor": None}


class Processor:
    """Qwen-Image 2.1 asks for the length of its system prompt, and for a token, also if no text is to be processed."""

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[0]]

    def encode(self, text: str) -> list[int]:
        return [1]


TRUE_GUIDANCE = {"guided": {"true_cfg_scale": 4.0}, "plain": {"true_cfg_scale": 1.0}}
GUIDANCE = {"guided": {"guidance_scale": 4.0}, "plain": {"guidance_scale": 1.0}}
FROM_ZERO = {"guided": {"guidance_scale": 4.0}, "plain": {"guidance_scale": 0.0}}
PIPELINES = [
    TinyPipeline("flux2", "flux2", "Flux2Pipeline", embeds, parts=flux2_parts),
    TinyPipeline("flux2-klein", "flux2", "Flux2KleinPipeline", embeds, **GUIDANCE, parts=flux2_parts),
    TinyPipeline(
        "flux2-edit",
        "flux2",
        "Flux2KleinPipeline",
        embeds,
        **GUIDANCE,
        parts=flux2_parts,
        extra=lambda: {"image": Image.new("RGB", (64, 96), "red")},
    ),
    TinyPipeline("qwen-image", "qwen-image", "QwenImagePipeline", with_mask("prompt_embeds_mask"), **TRUE_GUIDANCE),
    TinyPipeline(
        "qwen-edit",
        "qwen-image",
        "QwenImageEditPipeline",
        with_mask("prompt_embeds_mask"),
        **TRUE_GUIDANCE,
        parts=edit_parts,
        extra=lambda: {"image": Image.new("RGB", (64, 64), "red"), "height": 4 * SIZE, "width": 4 * SIZE},
    ),
    TinyPipeline(
        "qwen-image-21",
        "qwen-image-21",
        "QwenImage21Pipeline",
        with_mask("prompt_embeds_mask"),
        **TRUE_GUIDANCE,
        parts=lambda: {"processor": Processor()},
    ),
    TinyPipeline("z-image", "z-image", "ZImagePipeline", captions, **FROM_ZERO, batched=True),
    TinyPipeline("krea2", "krea2", "Krea2Pipeline", layers, **FROM_ZERO),
    TinyPipeline("chroma", "chroma", "ChromaPipeline", with_mask("prompt_attention_mask", torch.float32), **GUIDANCE),
    TinyPipeline(
        "auraflow",
        "auraflow",
        "AuraFlowPipeline",
        with_mask("prompt_attention_mask"),
        **GUIDANCE,
        batched=True,
        shifts=False,
    ),
]
