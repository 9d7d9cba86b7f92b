"""Tiny real models of every family, built from configs: no download, no mock.

`FAMILIES` are those up to Flux.1, `TODAY` the later image models, `VIDEO` the video models. Tests of a family that this
diffusers lacks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import nn

MASKED_LTX2 = "video_self_attention_mask" in signature(diffusers.LTX2VideoTransformer3DModel.forward).parameters
"""Whether this diffusers can keep references apart by a mask."""
SCOPES = ("module", "block", "stage")
TEXT_TOKENS, TEXT_WIDTH, AUDIO_TOKENS = 6, 32, 5
FRAMES, FRAME = 4, 16
"""Of the default video, and tokens of a frame."""
TOKENS = 64
"""Of the default image, and of the default video."""


@dataclass(frozen=True)
class Family:
    """A model family: how to build a tiny one, how to call it, and where its image is."""

    name: str
    build: Callable[..., nn.Module]
    inputs: Callable[..., dict]
    """batch, height and wide of the latent, seed; of videos also frames."""
    kinds: int = 1
    """Kinds of blocks that are merged."""
    odd: tuple[tuple[int, int], ...] = ((12, 20), (10, 14))
    """Latent sizes that are not square or not powers of two."""
    shallow: dict = field(default_factory=dict, hash=False)
    """Changes of the configuration that leave few layers but every kind of block: compiling a whole model takes
    seconds a layer."""
    missing: str = ""
    """Why it cannot be built here, if so. Its tests are then skipped, with this reason."""
    per_token: frozenset[str] = frozenset()
    """The arguments of blocks and of their attention, besides the tokens, that have a row for every token."""
    one_table: bool = False
    """Whether all samples have one table of positions, and so share their destinations."""
    grids: tuple[int, ...] = ()
    """Tokens of its grids, if it has several; else one of 64."""
    alone: int = 0
    """How many calls of attention come before the blocks that are merged."""
    start: int | None = None
    """Tokens before those that are merged, in every sequence. None: they are at the end."""
    patch: int = 2
    """Latents of a token's side, in videos."""
    given: int = 0
    """Frames at the beginning that are given, and stay whole."""

    def call(self, model: nn.Module, **arguments) -> torch.Tensor:
        return output_of(model, in_dtype(self.inputs(**arguments), model.dtype))

    @property
    def tokens(self) -> int:
        """That are merged."""
        return TOKENS - self.given * FRAME

    def reduced(self, length: int, ratio: float = 0.5) -> int:
        """The length of a sequence when its image is merged."""
        if self.grids:
            return round(length * (1 - ratio)) if length in self.grids else length
        return length - round(self.tokens * ratio) if length >= TOKENS else length

    def sized(self, frames: int, height: int, width: int, **arguments) -> dict:
        """A video of so many tokens."""
        return self.inputs(height=self.patch * height, wide=self.patch * width, frames=frames, **arguments)


def output_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Z-Image returns a list of pictures."""
    with torch.no_grad():
        output = model(**inputs, return_dict=False)[0]
    return torch.stack(output) if isinstance(output, list) else output


def outputs_of(model: nn.Module, inputs: dict) -> list[torch.Tensor]:
    """All that the model returns: LTX-2 also audio."""
    with torch.no_grad():
        found = model(**inputs, return_dict=False)
    return [output_of(model, inputs)] if isinstance(found[0], list) else list(found)


def with_sample(inputs: dict, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    """The same inputs with another noisy sample. Z-Image takes a list of pictures."""
    name = next(name for name in ("sample", "hidden_states", "x") if name in inputs)
    sample = inputs[name]
    return inputs | {name: [change(each) for each in sample] if isinstance(sample, list) else change(sample)}


EXACT = ("timestep", "t", "img_ids", "txt_ids", "position_ids")


def in_dtype(inputs: dict, dtype: torch.dtype) -> dict:
    """Positions and times stay exact, as pipelines keep them."""

    def convert(value):
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        if isinstance(value, list):
            return [convert(item) for item in value]
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {key: value if key in EXACT else convert(value) for key, value in inputs.items()}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def lively(model: nn.Module) -> nn.Module:
    """Parameters that start at zero (gates, tables, paddings) get other values: else blocks would change nothing."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.any() or name.endswith("pad_token"):  # in diffusers 0.38 these have no value yet
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


def missing(*class_names: str) -> str:
    """The reason to skip a test that needs these classes, if this diffusers lacks one of them."""
    lacking = [name for name in class_names if not hasattr(diffusers, name)]
    return f"diffusers {diffusers.__version__} has no {', '.join(lacking)}" if lacking else ""


def needs(*class_names: str) -> pytest.MarkDecorator:
    """Skips a test where this diffusers lacks a class."""
    return pytest.mark.skipif(bool(missing(*class_names)), reason=missing(*class_names))


def sd15_unet(**changes) -> nn.Module:
    settings = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
    }
    return seeded(lambda: UNet2DConditionModel(**settings | changes))


def sdxl_unet(**changes) -> nn.Module:
    settings = {
        "sample_size": 32,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "cross_attention_dim": 64,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    return seeded(lambda: UNet2DConditionModel(**settings | changes))


def flux_transformer(**changes) -> nn.Module:
    settings = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }
    return seeded(lambda: FluxTransformer2DModel(**settings | changes))


def sd3_transformer(**changes) -> nn.Module:
    settings = {
        "sample_size": 32,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": 4,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 64,
        "out_channels": 4,
        "pos_embed_max_size": 96,
        "dual_attention_layers": (0, 1),
        "qk_norm": "rms_norm",
    }
    return seeded(lambda: SD3Transformer2DModel(**settings | changes))


def pixart_transformer(**changes) -> nn.Module:
    settings = {
        "sample_size": 16,
        "num_layers": 3,
        "patch_size": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "in_channels": 4,
        "cross_attention_dim": 32,
        "out_channels": 8,
        "caption_channels": 32,
        "use_additional_conditions": False,
        "norm_type": "ada_norm_single",
    }
    return seeded(lambda: PixArtTransformer2DModel(**settings | changes))


def ids(height: int, width: int, axes: int = 3, first: int = 0) -> torch.Tensor:
    """[height · width, axes]: the number of the image, row and column, then zeros."""
    found = torch.zeros(height, width, axes)
    found[..., 0] = first
    found[..., 1] = torch.arange(height)[:, None]
    found[..., 2] = torch.arange(width)[None]
    return found.reshape(-1, axes)


def unet_inputs(width: int = 32, **extra) -> Callable[..., dict]:
    def inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
        generator = torch.Generator().manual_seed(seed)
        return {
            "sample": torch.randn(batch, 4, height, wide, generator=generator),
            "timestep": torch.tensor(10),
            "encoder_hidden_states": torch.randn(batch, 7, width, generator=generator),
            **{name: value(batch, generator) for name, value in extra.items()},
        }

    return inputs


def sdxl_conditions(batch: int, generator: torch.Generator) -> dict:
    return {
        "text_embeds": torch.randn(batch, 32, generator=generator),
        "time_ids": torch.randn(batch, 6, generator=generator),
    }


def flux_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, height * wide, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids(height, wide),
        "txt_ids": torch.zeros(6, 3),
    }


def sd3_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, wide, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "pooled_projections": torch.randn(batch, 64, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }


def pixart_inputs(batch: int = 2, height: int = 16, wide: int = 16, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, height, wide, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 6, 32, generator=generator),
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


FLUX_LIKE = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT_WIDTH,
}
CONFIGS: dict[str, dict] = {
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
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
HUNYUAN = HEADS | {
    "out_channels": 4,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": TEXT_WIDTH,
    "rope_axes_dim": (4, 6, 6),
}
CONFIGS |= {
    "WanTransformer3DModel": HEADS
    | {
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "cross_attn_norm": True,
        "rope_max_seq_len": 64,
    },
    "LTX2VideoTransformer3DModel": HEADS
    | {
        "in_channels": 8,
        "out_channels": 8,
        "cross_attention_dim": 32,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
        "num_layers": 3,
        "caption_channels": TEXT_WIDTH,
    },
    "MiniMaxH3Transformer3DModel": HEADS
    | {
        "hidden_size": 32,
        "num_layers": 3,
        "num_refiner_layers": 1,
        "ffn_dim": 64,
        "in_channels": 2,
        "audio_in_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 32,
        "time_embed_hidden_dim": 32,
        "time_embed_dim": 32,
        "rope_freq_dim": 2,
    },
    "HunyuanVideo15Transformer3DModel": HUNYUAN
    | {"in_channels": 4, "patch_size": 2, "text_embed_2_dim": 16, "image_embed_dim": 8, "num_layers": 3},
    "HunyuanVideoTransformer3DModel": HUNYUAN | {"in_channels": 4, "num_single_layers": 3, "pooled_projection_dim": 8},
    "CogVideoXTransformer3DModel": HEADS
    | {
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 3,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 13,
        "max_text_seq_length": TEXT_TOKENS,
        "use_rotary_positional_embeddings": True,
    },
    "MochiTransformer3DModel": HEADS
    | {
        "num_layers": 3,
        "pooled_projection_dim": 16,
        "in_channels": 4,
        "text_embed_dim": 64,
        "time_embed_dim": 32,
        "max_sequence_length": TEXT_TOKENS,
    },
}


def build(class_name: str, **fixed) -> Callable[..., nn.Module]:
    def model(**changes) -> nn.Module:
        if reason := missing(class_name):
            pytest.skip(reason)
        return lively(seeded(lambda: getattr(diffusers, class_name)(**CONFIGS[class_name] | fixed | changes)))

    return model


def packed(batch: int, height: int, wide: int, seed: int) -> tuple[torch.Generator, dict]:
    """What models on packed latents take: tokens, text and time."""
    generator = torch.Generator().manual_seed(seed)
    return generator, {
        "hidden_states": torch.randn(batch, height * wide, 8, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH, generator=generator),
        "timestep": torch.full((batch,), 0.5),
    }


def packed_inputs(axes: int) -> Callable[..., dict]:
    def inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
        _, common = packed(batch, height, wide, seed)
        return common | {"img_ids": ids(height, wide, axes), "txt_ids": torch.zeros(TEXT_TOKENS, axes)}

    return inputs


def chroma_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0) -> dict:
    """The last two tokens of the text are padding."""
    mask = torch.ones(batch, TEXT_TOKENS + height * wide)
    mask[:, TEXT_TOKENS - 2 : TEXT_TOKENS] = 0
    return packed_inputs(3)(batch, height, wide, seed) | {"attention_mask": mask}


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
    inputs = packed_inputs(4)()
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


def common(batch: int, seed: int, *sample: int, text_width: int = TEXT_WIDTH) -> tuple[torch.Generator, dict]:
    """What all models take: a sample of that shape, text, and a time."""
    generator = torch.Generator().manual_seed(seed)
    return generator, {
        "hidden_states": torch.randn(batch, *sample, generator=generator),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, text_width, generator=generator),
        "timestep": torch.full((batch,), 500.0),
    }


def padded(batch: int) -> torch.Tensor:
    """A mask of the text, whose last two tokens are padding."""
    mask = torch.ones(batch, TEXT_TOKENS, dtype=torch.bool)
    mask[:, -2:] = False
    return mask


def wan_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    return common(batch, seed, 4, frames, height, wide)[1]


def ti2v_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    """The first frame is given: its time is 0."""
    times = torch.full((batch, frames, height // 2 * (wide // 2)), 500.0)
    times[:, 0] = 0
    return wan_inputs(batch, height, wide, seed, frames) | {"timestep": times.flatten(1)}


def ltx2_inputs(batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, frames * height * wide, 8)
    return inputs | {
        "audio_hidden_states": torch.randn(batch, AUDIO_TOKENS, 4, generator=generator),
        "audio_encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, TEXT_WIDTH, generator=generator),
        "encoder_attention_mask": padded(batch).float(),
        "audio_encoder_attention_mask": padded(batch).float(),
        "num_frames": frames,
        "height": height,
        "width": wide,
        "audio_num_frames": AUDIO_TOKENS,
    }


def ltx2_given_inputs(batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4) -> dict:
    """The first frame is given, and a reference of two tokens comes after the video, which a mask keeps apart."""
    inputs, tokens = ltx2_inputs(batch, height, wide, seed, frames), frames * height * wide
    times = torch.full((batch, tokens + 2), 500.0)
    times[:, : height * wide] = times[:, tokens:] = 0
    mask = torch.ones(batch, tokens + 2, tokens + 2)
    mask[:, :tokens, tokens:] = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(seed))
    masks = {"video_self_attention_mask": mask} if MASKED_LTX2 else {}
    references = torch.full((batch, 2, 8), 0.5)
    coordinates = torch.rand(batch, 3, tokens + 2, 2, generator=torch.Generator().manual_seed(7))
    return inputs | {
        "hidden_states": torch.cat([inputs["hidden_states"], references], dim=1),
        "timestep": times,
        "audio_timestep": torch.full((batch,), 500.0),
        "video_coords": coordinates,
        **masks,
    }


def h3_positions(frames: int, height: int, wide: int, keyframes: int = 1) -> torch.Tensor:
    """(time, row, column) of text, given frames, audio and video, as the pipeline makes them: of uneven spacing."""
    rows, columns = torch.arange(height) * 1.5 - 3, torch.arange(wide) * 1.5 + 2
    plane = torch.cartesian_prod(rows, columns).double().reshape(-1, 2)
    text = torch.zeros(TEXT_TOKENS, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(TEXT_TOKENS)
    audio = torch.zeros(AUDIO_TOKENS, 3, dtype=torch.float64)
    audio[:, 0] = TEXT_TOKENS + torch.arange(AUDIO_TOKENS)
    times = TEXT_TOKENS + torch.tensor([0, 5 / 3, *(25 / 3 + 20 / 3 * torch.arange(60)).tolist()])[:frames].double()
    video = torch.cat([times.repeat_interleave(len(plane))[:, None], plane.repeat(frames, 1)], dim=1)
    given = torch.cat([torch.full((len(plane), 1), float(TEXT_TOKENS)), plane], dim=1).repeat(keyframes, 1)
    return torch.cat([text, given, audio, video])


def h3_inputs(
    batch: int = 2, height: int = 4, wide: int = 4, seed: int = 0, frames: int = 4, keyframes: int = 1
) -> dict:
    """One keyframe is given. Video, audio and what is given have times of their own."""
    size = height * wide
    generator, inputs = common(batch, seed, (frames + keyframes) * size, 8)
    text, given, audio, video = torch.arange(TEXT_TOKENS + keyframes * size + AUDIO_TOKENS + frames * size).split(
        [TEXT_TOKENS, keyframes * size, AUDIO_TOKENS, frames * size]
    )
    length = int(video[-1]) + 1
    tags, times = torch.zeros(length, dtype=torch.long), torch.zeros(length, dtype=torch.long)
    tags[text], tags[audio] = 1, 2
    times[video], times[audio] = 1, 2
    return inputs | {
        "audio_hidden_states": torch.randn(batch, AUDIO_TOKENS, 4, generator=generator),
        "timestep": torch.tensor([0.0, 0.5, 0.25]),
        "timestep_indices": times,
        "token_tags": tags,
        "position_ids": h3_positions(frames, height, wide, keyframes),
        "video_indices": torch.cat([given, video]),
        "audio_indices": audio,
        "text_indices": text,
    }


def hunyuan15_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, 4, frames, height, wide)
    return inputs | {
        "encoder_attention_mask": padded(batch),
        "encoder_hidden_states_2": torch.randn(batch, 3, 16, generator=generator),
        "encoder_attention_mask_2": torch.ones(batch, 3, dtype=torch.bool),
        "image_embeds": torch.randn(batch, 2, 8, generator=generator),
    }


def hunyuan_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    generator, inputs = common(batch, seed, 4, frames, height, wide)
    return inputs | {
        "encoder_attention_mask": padded(batch),
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "guidance": torch.full((batch,), 6000.0),
    }


def cogvideox_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    inputs = added_inputs(batch, height, wide, seed, frames)
    angles = torch.rand(frames * (height // 2) * (wide // 2), 16, generator=torch.Generator().manual_seed(7)) * 6
    return inputs | {"image_rotary_emb": (angles.cos(), angles.sin())}


def added_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    return common(batch, seed, frames, 4, height, wide)[1]


def mochi_inputs(batch: int = 2, height: int = 8, wide: int = 8, seed: int = 0, frames: int = 4) -> dict:
    inputs = common(batch, seed, 4, frames, height, wide, text_width=64)[1]
    return inputs | {"encoder_attention_mask": padded(batch)}


def family(name: str, of: str, inputs: Callable[..., dict], per_token: str = "", **facts) -> Family:
    """A family whose class may be missing. `per_token` are names."""
    class_name = f"{of}Transformer{facts.pop('dims', 2)}DModel"
    build_it = build(class_name, **facts.pop("config", {}))
    return Family(name, build_it, inputs, missing=missing(class_name), per_token=frozenset(per_token.split()), **facts)


FAMILIES = [
    Family(
        "sd15",
        sd15_unet,
        unet_inputs(32),
        kinds=2,
        odd=((12, 20), (13, 17), (10, 14)),
        shallow={"up_block_types": ("UpBlock2D", "UpBlock2D")},
        grids=(256, 64),
    ),
    Family(
        "sdxl",
        sdxl_unet,
        unet_inputs(64, added_cond_kwargs=sdxl_conditions),
        odd=((24, 40), (25, 31)),
        shallow={
            "block_out_channels": (32,),
            "down_block_types": ("CrossAttnDownBlock2D",),
            "up_block_types": ("UpBlock2D",),
            "mid_block_type": None,
            "transformer_layers_per_block": 2,
            "attention_head_dim": 2,
        },
        grids=(64,),
    ),
    Family(
        "flux",
        flux_transformer,
        flux_inputs,
        kinds=2,
        odd=((6, 10), (9, 7)),
        shallow={"num_layers": 1, "num_single_layers": 2},
        per_token=frozenset({"image_rotary_emb"}),
        one_table=True,
    ),
    Family("sd3", sd3_transformer, sd3_inputs, shallow={"num_layers": 2, "dual_attention_layers": (0,)}),
    Family("pixart", pixart_transformer, pixart_inputs, shallow={"num_layers": 2}),
]
FEW, FEW_OF_BOTH = {"shallow": {"num_layers": 2}}, {"shallow": {"num_layers": 1, "num_single_layers": 2}, "kinds": 2}
ODD, ODD_LATENTS = {"odd": ((6, 10), (9, 7))}, {"odd": ((12, 20), (14, 10))}
"""In tokens, or in latents of which four make a token."""
TABLE = {"one_table": True} | ODD
ROTARY = "image_rotary_emb"
TODAY = [
    family("flux2", "Flux2", packed_inputs(4), ROTARY, **TABLE, **FEW_OF_BOTH),
    family("flux3", "Flux3", packed_inputs(4), f"{ROTARY} temb_mod", **TABLE, **FEW_OF_BOTH),
    family("qwen-image", "QwenImage", qwen_inputs, ROTARY, **TABLE, **FEW),
    family(
        "qwen-image-21",
        "QwenImage21",
        qwen21_inputs,
        "rotary_emb target_token_mask",
        **TABLE | {"odd": ((6, 10), (14, 4))},
        **FEW,
    ),
    family(
        "z-image",
        "ZImage",
        z_image_inputs,
        "freqs_cis attn_mask attention_mask",
        shallow={"n_layers": 2},
        alone=2,
        start=0,
        **ODD_LATENTS,
    ),
    family("krea2", "Krea2", krea2_inputs, f"{ROTARY} attention_mask", **TABLE, **FEW),
    family("chroma", "Chroma", chroma_inputs, f"{ROTARY} attention_mask", **TABLE, **FEW_OF_BOTH),
    family(
        "auraflow",
        "AuraFlow",
        aura_flow_inputs,
        kinds=2,
        shallow={"num_mmdit_layers": 1, "num_single_dit_layers": 2},
        **ODD_LATENTS,
    ),
]
EVERY_FAMILY = [*FAMILIES, *TODAY]
"""Of images."""

CLIP = {"dims": 3, "start": 0}
GIVEN = CLIP | {"start": FRAME, "given": 1}
IN_LTX2 = "video_rotary_emb ca_video_rotary_emb query_rotary_emb"
TIMES_IN_LTX2 = "temb temb_ca_scale_shift temb_ca_gate self_attention_mask attention_mask"
IN_HUNYUAN = f"freqs_cis {ROTARY} attention_mask"
H3 = {"start": TEXT_TOKENS + FRAME + AUDIO_TOKENS, "patch": 1, "one_table": True, "dims": 3}
SPLIT, REPLACE = {"config": {"rope_type": "split"}}, {"config": {"image_condition_type": "token_replace"}}
ADDED = {"config": {"use_rotary_positional_embeddings": False}}
VIDEO = [
    family("wan", "Wan", wan_inputs, "rotary_emb", **CLIP),
    family("wan-ti2v", "Wan", ti2v_inputs, "rotary_emb temb", **GIVEN),
    family("ltx2", "LTX2Video", ltx2_inputs, IN_LTX2, patch=1, **CLIP),
    family("ltx2-given", "LTX2Video", ltx2_given_inputs, f"{IN_LTX2} {TIMES_IN_LTX2}", patch=1, **GIVEN, **SPLIT),
    family("h3", "MiniMaxH3", h3_inputs, "rotary_emb adaln_indices", **H3),
    family("hunyuan15", "HunyuanVideo15", hunyuan15_inputs, f"freqs_cis {ROTARY}", one_table=True, **CLIP),
    family("hunyuan", "HunyuanVideo", hunyuan_inputs, IN_HUNYUAN, kinds=2, one_table=True, **CLIP),
    family("hunyuan-replace", "HunyuanVideo", hunyuan_inputs, IN_HUNYUAN, kinds=2, one_table=True, **GIVEN, **REPLACE),
    family("cogvideox", "CogVideoX", cogvideox_inputs, ROTARY, one_table=True, **CLIP),
    family("cogvideox-added", "CogVideoX", added_inputs, **CLIP, **ADDED),
    family("mochi", "Mochi", mochi_inputs, ROTARY, **CLIP),
]
ALL = [*EVERY_FAMILY, *VIDEO]
BUILDERS = [family for family in ALL if family.name in ("sd15", "flux", "z-image", "wan")]
"""One of every builder of blocks: U-Net, joint and single, sequence, cross. For what does not depend on the family."""


def chosen(*names: str) -> list[Family]:
    """Some families."""
    return [family for family in ALL if family.name in names]


def one(name: str) -> Family:
    """A family by its name."""
    return next(family for family in ALL if family.name == name)
