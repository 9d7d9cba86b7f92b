"""Tiny real models of the families that came after Flux.1. Tests of those that this diffusers lacks are skipped."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import pytest
import torch
from tiny import FAMILIES, Family, seeded
from torch import nn

TEXT_TOKENS, TEXT_WIDTH = 6, 32
FLUX_LIKE = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
}
CONFIGS = {
    "Flux2Transformer2DModel": FLUX_LIKE
    | {"timestep_guidance_channels": 16, "mlp_ratio": 2.0, "axes_dims_rope": (4, 4, 4, 4), "guidance_embeds": False},
    "Flux3Transformer2DModel": FLUX_LIKE
    | {"cond_in_channels": 8, "timestep_channels": 16, "mlp_ratio": 2.0, "axes_dims_rope": (4, 4, 4, 4)},
    "ChromaTransformer2DModel": FLUX_LIKE
    | {
        "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 16,
        "approximator_layers": 1,
    },
    "QwenImageTransformer2DModel": {
        "in_channels": 8,
        "out_channels": 2,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    },
    "QwenImage21Transformer2DModel": {
        "in_channels": 8,
        "out_channels": 8,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": TEXT_WIDTH,
        "axes_dims_rope": (4, 6, 6),
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 3,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": TEXT_WIDTH,
        "axes_dims": [4, 6, 6],
        "axes_lens": [256, 64, 64],
    },
    "Krea2Transformer2DModel": {
        "in_channels": 8,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "timestep_embed_dim": 16,
        "text_hidden_dim": TEXT_WIDTH,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 32,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 6, 6),
    },
    "AuraFlowTransformer2DModel": {
        "sample_size": 16,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT_WIDTH,
        "caption_projection_dim": 32,
        "pos_embed_max_size": 256,
    },
}


def build(class_name: str) -> Callable[..., nn.Module]:
    def model(**changes) -> nn.Module:
        return lively(seeded(lambda: getattr(diffusers, class_name)(**CONFIGS[class_name] | changes)))

    return model


def lively(model: nn.Module) -> nn.Module:
    """Parameters that start at zero (gates, tables, paddings) get other values: else blocks would change nothing."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.any() or name.endswith("pad_token"):  # in diffusers 0.38 these have no value yet
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def ids(height: int, width: int, axes: int, first: int = 0) -> torch.Tensor:
    """[height · width, axes]: the number of the image, row and column, then zeros."""
    found = torch.zeros(height, width, axes)
    found[..., 0] = first
    found[..., 1] = torch.arange(height)[:, None]
    found[..., 2] = torch.arange(width)[None]
    return found.reshape(-1, axes)


def packed(batch: int, height: int, wide: int, seed: int) -> tuple[torch.Generator, dict]:
    """What models on packed latents take: tokens, text and time."""
    generator = torch.Generator().manual_seed(seed)
    return generator, {
        "hidden_states": torch.randn(batch, height * wide, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH, generator=generator),
        "timestep": torch.full((batch,), 0.5),
    }


def flux_inputs(axes: int) -> Callable[..., dict]:
    def inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
        _, common = packed(batch, height, wide, seed)
        return common | {"img_ids": ids(height, wide, axes), "txt_ids": torch.zeros(TEXT_TOKENS, axes)}

    return inputs


def chroma_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    """The last two tokens of the text are padding."""
    mask = torch.ones(batch, TEXT_TOKENS + height * wide)
    mask[:, TEXT_TOKENS - 2 : TEXT_TOKENS] = 0
    return flux_inputs(3)(batch, height, wide, seed) | {"attention_mask": mask}


def qwen_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    """The last two tokens of the text are padding."""
    _, common = packed(batch, height, wide, seed)
    mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.bool)
    mask[:, -2:] = False
    return common | {"encoder_hidden_states_mask": mask, "img_shapes": [[(1, height, wide)]] * batch}


def qwen21_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    """Text encoders keep a place for every four tokens of the image, after the text."""
    _, common = packed(batch, height, wide, seed)
    slots = torch.zeros(batch, TEXT_TOKENS + height * wide // 4, dtype=torch.bool)
    slots[:, TEXT_TOKENS:] = True
    return common | {"img_mask": slots, "img_shapes": [[(1, height, wide)]] * batch}


def z_image_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    """Captions of different lengths: after padding, the second one is longer than the first."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": [torch.randn(4, 1, height, wide, generator=generator) for _ in range(batch)],
        "t": torch.full((batch,), 0.5),
        "cap_feats": [torch.randn(5 + 40 * index, TEXT_WIDTH, generator=generator) for index in range(batch)],
    }


def krea2_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    """The last two tokens of the text are padding."""
    generator, common = packed(batch, height, wide, seed)
    mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.bool)
    mask[:, -2:] = False
    return common | {
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, 2, TEXT_WIDTH, generator=generator),
        "position_ids": torch.cat([torch.zeros(TEXT_TOKENS, 3), ids(height, wide, 3)]),
        "encoder_attention_mask": mask,
    }


def aura_flow_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, wide, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH, generator=generator),
        "timestep": torch.full((batch,), 0.5),
    }


def random(*shape: int, seed: int = 11) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


REFERENCE = (4, 6)
"""The size in tokens of a given picture."""
REFERENCE_TOKENS = 24


def flux2_edit(*references: int) -> dict:
    """Reference images come after the image. Each has another first id."""
    inputs = flux_inputs(4)()
    more = random(2, REFERENCE_TOKENS * len(references), 8)
    all_ids = [inputs["img_ids"], *(ids(*REFERENCE, 4, first) for first in references)]
    return inputs | {
        "hidden_states": torch.cat([inputs["hidden_states"], more], dim=1),
        "img_ids": torch.cat(all_ids),
    }


def qwen_edit(*sizes: tuple[int, int]) -> dict:
    """Reference images of these sizes come after the image."""
    inputs = qwen_inputs()
    more = random(2, sum(height * width for height, width in sizes), 8)
    return inputs | {
        "hidden_states": torch.cat([inputs["hidden_states"], more], dim=1),
        "img_shapes": [[(1, 8, 8), *((1, height, width) for height, width in sizes)]] * 2,
    }


def qwen21_padded() -> dict:
    """The second prompt is shorter."""
    mask = torch.ones(2, TEXT_TOKENS, dtype=torch.bool)
    mask[1, -2:] = False
    return qwen21_inputs() | {"encoder_hidden_states_mask": mask}


def qwen21_edit() -> dict:
    """Two tokens of text, a reference image, four more of text, then the image."""
    inputs, slots = qwen21_inputs(), REFERENCE_TOKENS // 4
    mask = torch.zeros(2, slots + inputs["img_mask"].shape[1], dtype=torch.bool)
    mask[:, 2 : 2 + slots] = mask[:, TEXT_TOKENS + slots :] = True
    return inputs | {
        "hidden_states": torch.cat([random(2, REFERENCE_TOKENS, 8), inputs["hidden_states"]], dim=1),
        "encoder_hidden_states": random(2, TEXT_TOKENS + slots, TEXT_WIDTH),
        "img_mask": mask,
        "img_shapes": [[(1, *REFERENCE), (1, 8, 8)]] * 2,
    }


FEW, FEW_OF_BOTH = {"num_layers": 2}, {"num_layers": 1, "num_single_layers": 2}
ODD, ODD_LATENTS = ((6, 10), (9, 7)), ((12, 20), (14, 10))
"""In tokens, or in latents of which four make a token."""


def missing(*class_names: str) -> str:
    """The reason to skip a test that needs these classes, if this diffusers lacks one of them."""
    lacking = [name for name in class_names if not hasattr(diffusers, name)]
    return f"diffusers {diffusers.__version__} has no {', '.join(lacking)}" if lacking else ""


def needs(*class_names: str) -> pytest.MarkDecorator:
    """Skips a test where this diffusers lacks a class."""
    return pytest.mark.skipif(bool(missing(*class_names)), reason=missing(*class_names))


def family(name: str, class_name: str, inputs: Callable[..., dict], kinds: int, shallow: dict, odd=ODD) -> Family:
    return Family(name, build(class_name), inputs, kinds, odd, shallow, missing(class_name))


TODAY = [
    family("flux2", "Flux2Transformer2DModel", flux_inputs(4), 2, FEW_OF_BOTH),
    family("flux3", "Flux3Transformer2DModel", flux_inputs(4), 2, FEW_OF_BOTH),
    family("qwen-image", "QwenImageTransformer2DModel", qwen_inputs, 1, FEW),
    family("qwen-image-21", "QwenImage21Transformer2DModel", qwen21_inputs, 1, FEW, ((6, 10), (14, 4))),
    family("z-image", "ZImageTransformer2DModel", z_image_inputs, 1, {"n_layers": 2}, ODD_LATENTS),
    family("krea2", "Krea2Transformer2DModel", krea2_inputs, 1, FEW),
    family("chroma", "ChromaTransformer2DModel", chroma_inputs, 2, FEW_OF_BOTH),
    family(
        "auraflow",
        "AuraFlowTransformer2DModel",
        aura_flow_inputs,
        2,
        {"num_mmdit_layers": 1, "num_single_dit_layers": 2},
        ODD_LATENTS,
    ),
]
EVERY_FAMILY = [*FAMILIES, *TODAY]
