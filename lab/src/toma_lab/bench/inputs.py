"""Inputs for a denoiser: random tensors in the shapes that its pipeline would pass, for every family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from toma_lab.bench.clip_inputs import CLIP_FAMILIES
from toma_lab.bench.requests import EMPTY_PROMPT_TOKENS, LATENT_FACTOR, PROMPT_TOKENS, Family, RandomTensors, Request

TIME_IDS = 6
"""SDXL gets six numbers: the original size, the corner of the crop and the target size."""


def _unet(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    inputs: dict[str, Any] = {
        "sample": random(batch, config["in_channels"], *size),
        "timestep": random.constant(500, dtype=torch.int64),
        "encoder_hidden_states": random(batch, request.text_tokens, config["cross_attention_dim"]),
    }
    if config["addition_embed_type"] == "text_time":
        inputs["timestep"] = random.constant(500, dtype=torch.float32)  # SDXL's scheduler has no whole numbers
        pooled = config["projection_class_embeddings_input_dim"] - TIME_IDS * config["addition_time_embed_dim"]
        sizes = (request.height, request.width, 0, 0, request.height, request.width)
        time_ids = torch.tensor(sizes, device=random.device, dtype=random.dtype).expand(batch, -1)
        inputs["added_cond_kwargs"] = {"text_embeds": random(batch, pooled), "time_ids": time_ids.contiguous()}
    return inputs


def _flux(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    inputs = {
        "hidden_states": random(batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(batch, request.text_tokens, config["joint_attention_dim"]),
        "pooled_projections": random(batch, config["pooled_projection_dim"]),
        "timestep": random.constant(0.5, batch),
        "img_ids": _grid_ids(request, 3).to(random.device, random.dtype),
        "txt_ids": random.constant(0, request.text_tokens, 3),
    }
    if config["guidance_embeds"]:
        inputs["guidance"] = random.constant(3.5, batch, dtype=torch.float32)
    return inputs


def _sd3(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    return {
        "hidden_states": random(request.batch, config["in_channels"], *size),
        "encoder_hidden_states": random(request.batch, request.text_tokens, config["joint_attention_dim"]),
        "pooled_projections": random(request.batch, config["pooled_projection_dim"]),
        "timestep": random.constant(500, request.batch),
    }


def _pixart(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    batch = request.batch
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if config["use_additional_conditions"] or (config["use_additional_conditions"] is None and size == (128, 128)):
        conditions = {
            "resolution": random(batch, 2),
            "aspect_ratio": random.constant(request.height / request.width, batch, 1),
        }
    return {
        "hidden_states": random(batch, config["in_channels"], *size),
        "encoder_hidden_states": random(batch, request.text_tokens, config["caption_channels"]),
        "timestep": random.constant(500, batch, dtype=torch.int64),
        "added_cond_kwargs": conditions,
    }


def _flux2(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Positions have four numbers: of the reference image, row, column, and place in the text."""
    batch, text_tokens = request.batch, request.text_tokens
    text_ids = torch.zeros(text_tokens, 4, dtype=torch.int64)
    text_ids[:, 3] = torch.arange(text_tokens)
    inputs = {
        "hidden_states": random(batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(batch, text_tokens, config["joint_attention_dim"]),
        "timestep": random.constant(0.5, batch),
        "img_ids": _grid_ids(request, 4).long().to(random.device),
        "txt_ids": text_ids.to(random.device),
    }
    if config.get("guidance_embeds"):
        inputs["guidance"] = random.constant(4.0, batch, dtype=torch.float32)
    return inputs


def _chroma(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """The text is padded; a mask over text and image says with what."""
    batch, text_tokens = request.batch, request.text_tokens
    mask = torch.ones(batch, text_tokens + request.tokens, dtype=torch.bool)
    mask[:, min(text_tokens, PROMPT_TOKENS) : text_tokens] = False
    return {
        "hidden_states": random(batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(batch, text_tokens, config["joint_attention_dim"]),
        "timestep": random.constant(0.5, batch),
        "img_ids": _grid_ids(request, 3).to(random.device, random.dtype),
        "txt_ids": random.constant(0, text_tokens, 3),
        "attention_mask": mask.to(random.device),
    }


def _qwen_image(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Prompts are not padded, so that there is no mask."""
    return {
        "hidden_states": random(request.batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(request.batch, request.text_tokens, config["joint_attention_dim"]),
        "timestep": random.constant(0.5, request.batch),
        "img_shapes": [[(1, *request.grid)]] * request.batch,
    }


def _qwen_image21(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Without the KV cache of its pipeline, which leaves the text out from the second step on. After the text there is
    a place for every 2×2 tokens of the image."""
    batch, text_tokens = request.batch, request.text_tokens
    places = torch.zeros(batch, text_tokens + request.tokens // 4, dtype=torch.bool)
    places[:, text_tokens:] = True
    return {
        "hidden_states": random(batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(batch, text_tokens, config["context_in_dim"]),
        "timestep": random.constant(0.5, batch),
        "img_shapes": [[(1, *request.grid)]] * batch,
        "img_mask": places.to(random.device),
    }


def _z_image(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Lists. The second half of a batch has the empty negative prompt, which is shorter."""
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    empty = request.batch // 2
    lengths = [request.text_tokens] * (request.batch - empty) + [min(EMPTY_PROMPT_TOKENS, request.text_tokens)] * empty
    return {
        "x": list(random(request.batch, config["in_channels"], 1, *size).unbind()),
        "t": random.constant(0.5, request.batch, dtype=torch.float32),
        "cap_feats": [random(length, config["cap_feat_dim"]) for length in lengths],
    }


def _krea2(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    """Several layers of the text encoder. A prompt is padded in the middle, before the end of its template."""
    batch, text_tokens = request.batch, request.text_tokens
    mask = torch.ones(batch, text_tokens, dtype=torch.bool)
    mask[:, min(text_tokens, PROMPT_TOKENS) : -5] = False
    ids = torch.cat([torch.zeros(text_tokens, 3), _grid_ids(request, 3)])
    layers = (config["num_text_layers"], config["text_hidden_dim"])
    return {
        "hidden_states": random(batch, request.tokens, config["in_channels"]),
        "encoder_hidden_states": random(batch, text_tokens, *layers),
        "timestep": random.constant(0.5, batch),
        "position_ids": ids.to(random.device),
        "encoder_attention_mask": mask.to(random.device),
    }


def _aura_flow(config: Mapping[str, Any], request: Request, random: RandomTensors) -> dict[str, Any]:
    size = (request.height // LATENT_FACTOR, request.width // LATENT_FACTOR)
    return {
        "hidden_states": random(request.batch, config["in_channels"], *size),
        "encoder_hidden_states": random(request.batch, request.text_tokens, config["joint_attention_dim"]),
        "timestep": random.constant(0.5, request.batch),
    }


def _grid_ids(request: Request, axes: int) -> Tensor:
    """[tokens, axes]: zero, row and column, then zeros."""
    height, width = request.grid
    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)[None]
    return ids.reshape(-1, axes)


FAMILIES: Mapping[str, Family] = {
    "UNet2DConditionModel": Family("sample", LATENT_FACTOR, 77, True, _unet),
    "FluxTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _flux),
    "SD3Transformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 333, True, _sd3),
    "PixArtTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 300, True, _pixart),
    "Flux2Transformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _flux2),
    "Flux3Transformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _flux2),
    "ChromaTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _chroma),
    "QwenImageTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, PROMPT_TOKENS, False, _qwen_image),
    "QwenImage21Transformer2DModel": Family("hidden_states", 4 * LATENT_FACTOR, PROMPT_TOKENS, False, _qwen_image21),
    "ZImageTransformer2DModel": Family("x", 2 * LATENT_FACTOR, PROMPT_TOKENS, True, _z_image),
    "Krea2Transformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 512, False, _krea2),
    "AuraFlowTransformer2DModel": Family("hidden_states", 2 * LATENT_FACTOR, 256, True, _aura_flow),
    **CLIP_FAMILIES,
}
"""By the name of the model class."""
