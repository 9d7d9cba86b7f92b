"""Tiny pipelines of the families that came after Flux.1, complete with text encoders, as folders. Built offline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import tiny
import torch
import transformers
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from tiny_pipelines import vae
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import T5Config, T5EncoderModel, T5TokenizerFast, UMT5Config, UMT5EncoderModel

WIDTH = tiny.TEXT_WIDTH
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def checkpoint(name: str) -> Path:
    """The folder of a pipeline. Written once per session."""
    folder = Path(tempfile.mkdtemp(prefix=f"tiny-{name}-"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        PIPELINES[name]().save_pretrained(folder)
    return folder


def _chroma() -> DiffusionPipeline:
    return diffusers.ChromaPipeline(
        vae=vae(latent_channels=2),
        text_encoder=_t5(T5EncoderModel, T5Config),
        tokenizer=T5TokenizerFast(),
        transformer=_transformer("ChromaTransformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _aura_flow() -> DiffusionPipeline:
    return diffusers.AuraFlowPipeline(
        vae=vae(),
        text_encoder=_t5(UMT5EncoderModel, UMT5Config),
        tokenizer=T5TokenizerFast(),
        transformer=_transformer("AuraFlowTransformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def _z_image() -> DiffusionPipeline:
    return diffusers.ZImagePipeline(
        vae=vae(),
        text_encoder=_qwen3("Qwen3Model", layers=2),
        tokenizer=qwen_tokenizer(),
        transformer=_transformer("ZImageTransformer2DModel", axes_lens=[1024, 64, 64]),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _flux2_klein() -> DiffusionPipeline:
    """Its text comes from the layers 9, 18 and 27 of the encoder."""
    return diffusers.Flux2KleinPipeline(
        vae=diffusers.AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=2,
        ),
        text_encoder=_qwen3("Qwen3ForCausalLM", layers=28),
        tokenizer=qwen_tokenizer(),
        transformer=_transformer("Flux2Transformer2DModel", joint_attention_dim=3 * WIDTH),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _qwen_image() -> DiffusionPipeline:
    return diffusers.QwenImagePipeline(
        vae=_qwen_vae(),
        text_encoder=_vision_language("Qwen2_5_VL", "ForConditionalGeneration"),
        tokenizer=qwen_tokenizer(),
        transformer=_transformer("QwenImageTransformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def _krea2() -> DiffusionPipeline:
    return diffusers.Krea2Pipeline(
        vae=_qwen_vae(),
        text_encoder=_vision_language("Qwen3VL", "Model"),
        tokenizer=qwen_tokenizer(),
        transformer=_transformer("Krea2Transformer2DModel"),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder_select_layers=(1, 2),
    )


def _transformer(class_name: str, **changes: Any) -> nn.Module:
    return tiny.build(class_name)(**changes)


def _t5(model: Callable[[Any], nn.Module], config: Callable[..., Any]) -> nn.Module:
    vocabulary = len(T5TokenizerFast())
    return model(config(vocab_size=vocabulary, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


def _text_settings(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(qwen_tokenizer()),
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }


def _qwen3(class_name: str, layers: int) -> nn.Module:
    return getattr(transformers, class_name)(transformers.Qwen3Config(**_text_settings(layers)))


def _vision_language(family: str, kind: str) -> nn.Module:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**_text_settings(layers=2), "rope_scaling": rotary, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": WIDTH}
    vision |= {"deepstack_visual_indexes": [0]} if family == "Qwen3VL" else {}
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    return getattr(transformers, f"{family}{kind}")(config)


def _qwen_vae() -> nn.Module:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=2, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 2, latents_std=[1.0] * 2
    )


@cache
def qwen_tokenizer() -> Any:
    """A token for every byte."""
    vocabulary = {token: index for index, token in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary_file, merges_file = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary_file.write_text(json.dumps(vocabulary))
        merges_file.write_text("#version: 0.2\n")
        tokenizer = transformers.Qwen2TokenizerFast(
            str(vocabulary_file), str(merges_file), additional_special_tokens=list(SPECIAL)
        )
    tokenizer.chat_template = CHAT
    return tokenizer


ALL: dict[str, tuple[str, Callable[[], DiffusionPipeline]]] = {
    "flux2-klein": ("Flux2KleinPipeline", _flux2_klein),
    "qwen-image": ("QwenImagePipeline", _qwen_image),
    "z-image": ("ZImagePipeline", _z_image),
    "krea2": ("Krea2Pipeline", _krea2),
    "chroma": ("ChromaPipeline", _chroma),
    "auraflow": ("AuraFlowPipeline", _aura_flow),
}
PIPELINES = {name: build for name, (class_name, build) in ALL.items() if hasattr(diffusers, class_name)}
"""Those that this diffusers has. FLUX.2 dev and Qwen-Image 2.1 are left out: their processors need torchvision."""
