"""A tiny real instance, with a real call, of every denoiser that the installed diffusers exports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from tiny import FAMILIES, Family
from tiny_today import TODAY, ids, lively
from tiny_video import VIDEO
from torch import nn

WORDS = ("Transformer", "UNet", "Unet", "UVit", "DiT")
"""A class that diffusers exports may be a denoiser if its name holds one of these, or if it is defined here:"""
MODULES = ("diffusers.models.transformers.", "diffusers.models.unets.")


@dataclass(frozen=True)
class Entry:
    """A denoiser: how to build a tiny one and how its pipeline calls it."""

    name: str
    """The class, and what is special about a variant: "WanTransformer3DModel, image to video"."""
    build: Callable[[], nn.Module]
    """Seeded by the caller."""
    inputs: Callable[[torch.Generator], dict[str, Any]]
    """Keyword arguments of one call of `forward`, without `return_dict`. float32, on the CPU."""
    sample: str = "hidden_states"
    """The argument that holds the noisy sample: a tensor, or a list of them."""
    time: str = "timestep"
    """The argument that holds the timestep; empty if there is none."""

    @property
    def class_name(self) -> str:
        return self.name.split(",")[0]

    @property
    def missing(self) -> str:
        """Why its tests are skipped, if they are."""
        lacks = not hasattr(diffusers, self.class_name)
        return f"diffusers {diffusers.__version__} has no {self.class_name}" if lacks else ""


def candidates() -> set[str]:
    """The names of all classes that diffusers exports and that may be denoisers."""
    exported = {name: getattr(diffusers, name) for name in dir(diffusers)}
    return {
        name
        for name, value in exported.items()
        if inspect.isclass(value)
        and issubclass(value, diffusers.ModelMixin)
        and (any(word in name for word in WORDS) or value.__module__.startswith(MODULES))
    }


Value = Callable[[torch.Generator], torch.Tensor]


def noise(*shape: int) -> Value:
    return lambda generator: torch.randn(shape, generator=generator)


def filled(value: Any, generator: torch.Generator) -> Any:
    """A description of arguments with its random tensors drawn. The others are copied."""
    if isinstance(value, dict):
        return {name: filled(item, generator) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, generator) for item in value]
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value(generator) if callable(value) else value


def whole(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without parameters that are zero or that nothing has initialised."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty then gives NaN
    try:
        model = build().eval().requires_grad_(False)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    for parameter in model.parameters():
        if parameter.isnan().any():
            parameter.normal_(std=0.2)
    return lively(model)


def entry(
    name: str, config: dict[str, Any], inputs: dict[str, Any], sample: str = "hidden_states", time: str = "timestep"
) -> Entry:
    """The class with this configuration, called with these arguments. `noise` in them is drawn for every call."""

    return Entry(
        name,
        lambda: whole(lambda: getattr(diffusers, name.split(",")[0])(**config)),
        lambda generator: filled(inputs, generator),
        sample,
        time,
    )


def of_family(
    name: str,
    family_name: str,
    config: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
    sample: str = "hidden_states",
    time: str = "timestep",
) -> Entry:
    """A family that the tests of the adapters build, with changes of its configuration and its arguments."""
    family: Family = next(family for family in [*FAMILIES, *TODAY, *VIDEO] if family.name == family_name)

    def arguments(generator: torch.Generator) -> dict[str, Any]:
        seed = int(torch.randint(2**31, (), generator=generator))
        found: dict[str, Any] = family.inputs(seed=seed) | filled(inputs or {}, generator)
        return found

    return Entry(name, lambda: whole(lambda: family.build(**config or {})), arguments, sample, time)


def rotary(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions that count up."""
    angles = torch.arange(tokens)[:, None] / 10 ** torch.arange(width)[None]
    return angles.cos(), angles.sin()


STEPS = torch.full((2,), 500.0)
"""A time between 0 and 1000, for two samples."""
SHARES = torch.full((2,), 0.5)
"""A time between 0 and 1."""

# U-Nets

SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
PIXEL_UNET = SMALL | {
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
}
UNET = SMALL | {
    "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
}
STEP = torch.tensor(500)
PIXELS = {"sample": noise(2, 3, 8, 8), "timestep": STEP}
LATENTS = {"sample": noise(2, 4, 8, 8), "timestep": STEP, "encoder_hidden_states": noise(2, 5, 16)}
CLIP = {"sample": noise(2, 4, 3, 8, 8), "timestep": STEP, "encoder_hidden_states": noise(2, 5, 16)}


def unet(name: str, config: dict[str, Any], inputs: dict[str, Any]) -> Entry:
    return entry(name, config, inputs, "sample")


UNETS = (
    unet("UNet2DModel", PIXEL_UNET, PIXELS),
    unet("UNet2DModel, of classes", PIXEL_UNET | {"num_class_embeds": 3}, PIXELS | {"class_labels": torch.arange(2)}),
    unet(
        "UNet2DModel, with a learned variance and a given picture",
        PIXEL_UNET | {"in_channels": 6, "out_channels": 6, "resnet_time_scale_shift": "scale_shift"},
        PIXELS | {"sample": noise(2, 6, 8, 8)},
    ),
    unet(
        "UNet2DModel, with skipped pictures",
        SMALL
        | {
            "block_out_channels": (32, 32),  # what these blocks add has groups of 4 channels
            "sample_size": 8,
            "time_embedding_type": "fourier",
            "norm_num_groups": None,
            "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
            "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
        },
        PIXELS | {"timestep": torch.full((2,), 0.5)},
    ),
    of_family("UNet2DConditionModel", "sd15", sample="sample"),
    unet(
        "UNet2DConditionModel, with sizes",
        UNET
        | {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 60,
            "use_linear_projection": True,
        },
        LATENTS
        | {
            "added_cond_kwargs": {"text_embeds": noise(2, 12), "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}
        },
    ),
    unet("UNet2DConditionModel, inpainting", UNET | {"in_channels": 9}, LATENTS | {"sample": noise(2, 9, 8, 8)}),
    unet(
        "UNet2DConditionModel, of classes with a learned variance",
        UNET | {"in_channels": 7, "out_channels": 6, "num_class_embeds": 8},
        LATENTS | {"sample": noise(2, 7, 8, 8), "class_labels": torch.tensor([2, 5])},
    ),
    unet(
        "UNet2DConditionModel, with an embedded guidance",
        UNET | {"time_cond_proj_dim": 8},
        LATENTS | {"timestep_cond": noise(2, 8)},
    ),
    unet(
        "UNet2DConditionModel, of an image embedding",
        UNET
        | {
            "out_channels": 8,
            "down_block_types": ("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "up_block_types": ("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
            "addition_embed_type": "image",
            "encoder_hid_dim": 12,
            "encoder_hid_dim_type": "image_proj",
            "resnet_time_scale_shift": "scale_shift",
        },
        LATENTS | {"encoder_hidden_states": None, "added_cond_kwargs": {"image_embeds": noise(2, 12)}},
    ),
    unet(
        "UNet2DConditionModel, with a ControlNet",
        UNET,
        LATENTS
        | {
            "down_block_additional_residuals": [
                noise(2, 8, 8, 8),
                noise(2, 8, 8, 8),
                noise(2, 8, 4, 4),
                noise(2, 16, 4, 4),
            ],
            "mid_block_additional_residual": noise(2, 16, 4, 4),
        },
    ),
    unet(
        "AudioLDM2UNet2DConditionModel",
        UNET | {"cross_attention_dim": ((None, 16, 24), (None, 16, 24)), "attention_head_dim": 4},
        LATENTS | {"encoder_hidden_states_1": noise(2, 6, 24), "encoder_attention_mask_1": torch.ones(2, 6)},
    ),
    unet(
        "UNet1DModel",
        {"extra_in_channels": 16, "time_embedding_dim": 16},
        {"sample": noise(2, 2, 64), "timestep": STEP},
    ),
    unet(
        "UNet1DModel, of plans",
        {
            "in_channels": 6,
            "out_channels": 6,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D", "DownResnetBlock1D"),
            "up_block_types": ("UpResnetBlock1D",),
            "block_out_channels": (8, 16),
            "act_fn": "mish",
        },
        {"sample": noise(2, 6, 16), "timestep": torch.tensor([500, 500])},
    ),
    unet(
        "UNet3DConditionModel",
        UNET
        | {
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        CLIP,
    ),
    unet(
        "UNetMotionModel",
        SMALL
        | {
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "motion_num_attention_heads": 2,
        },
        CLIP | {"encoder_hidden_states": noise(6, 5, 16)},
    ),
    unet(
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 64),  # of one channel each, its 32 groups would take the time away
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "layers_per_block": 1,
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "num_frames": 3,
        },
        {
            "sample": noise(2, 3, 8, 8, 8),
            "timestep": torch.tensor(1.6),
            "encoder_hidden_states": noise(2, 1, 16),
            "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2),
        },
    ),
    unet(
        "I2VGenXLUNet",
        UNET
        | {
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "num_attention_heads": None,
        },
        CLIP | {"fps": torch.tensor([16, 16]), "image_latents": noise(2, 4, 3, 8, 8), "image_embeddings": noise(2, 16)},
    ),
    unet(
        "Kandinsky3UNet",
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 4,
            "layers_per_block": 2,
            "block_out_channels": (8, 16),
            "cross_attention_dim": 16,
            "encoder_hid_dim": 12,
        },
        LATENTS | {"encoder_hidden_states": noise(2, 5, 12), "encoder_attention_mask": torch.ones(2, 5)},
    ),
    unet(
        "UNetControlNetXSModel",
        {
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "num_attention_heads": 2,
            "upcast_attention": False,
            "ctrl_block_out_channels": (4, 8),
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 2,
            "ctrl_conditioning_embedding_out_channels": (2, 2),
        },
        LATENTS | {"controlnet_cond": noise(2, 3, 16, 16), "conditioning_scale": 1.0, "apply_control": True},
    ),
)

# Images

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
PATCHED = HEADS | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2}
IMAGE = {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 16), "timestep": STEPS}
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
"""Of the text: the second prompt is shorter."""
SIZES = {"target_size": torch.tensor([[64.0, 64]] * 2), "crop_coords": torch.zeros(2, 2)}
JOINT = HEADS | {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 2, 4),
}
TOKENS = {
    "hidden_states": noise(2, 16, 4),
    "encoder_hidden_states": noise(2, 5, 16),
    "timestep": SHARES,
    "img_ids": ids(4, 4, 3),
    "txt_ids": torch.zeros(5, 3),
}
GUIDANCE = {"guidance": torch.full((2,), 3.5)}
COGVIEW = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_dim": 16,
    "time_embed_dim": 16,
    "condition_dim": 4,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
JOY = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "text_dim": 16,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
}
LUMINA = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 2,
}
SANA = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
}
IMAGES = (
    of_family("FluxTransformer2DModel", "flux"),
    of_family(
        "FluxTransformer2DModel, filling with an embedded guidance",
        "flux",
        {"in_channels": 12, "out_channels": 4, "guidance_embeds": True},
        {"hidden_states": noise(2, 64, 12)} | GUIDANCE,
    ),
    of_family("Flux2Transformer2DModel", "flux2"),
    of_family("Flux2Transformer2DModel, with an embedded guidance", "flux2", {"guidance_embeds": True}, GUIDANCE),
    of_family("Flux3Transformer2DModel", "flux3"),
    of_family(
        "Flux3Transformer2DModel, of a reference and with the next time",
        "flux3",
        {"flow_map": True},
        {
            "image_cond_hidden_states": noise(2, 16, 8),
            "image_cond_ids": ids(4, 4, 4, 10),
            "target_timestep": torch.full((2,), 0.25),
        },
    ),
    of_family("ChromaTransformer2DModel", "chroma"),
    entry("BriaTransformer2DModel", JOINT, TOKENS | {"timestep": STEPS}),
    entry(
        "BriaFiboTransformer2DModel",
        JOINT | {"text_encoder_dim": 8},
        TOKENS | {"timestep": STEPS, "text_encoder_layers": [noise(2, 5, 8)] * 4},
    ),
    entry("LongCatImageTransformer2DModel", JOINT | {"pooled_projection_dim": 16}, TOKENS | {"guidance": None}),
    entry("OvisImageTransformer2DModel", JOINT | {"out_channels": 4}, TOKENS),
    of_family("QwenImageTransformer2DModel", "qwen-image"),
    of_family(
        "QwenImageTransformer2DModel, with layers",
        "qwen-image",
        {"use_additional_t_cond": True, "use_layer3d_rope": True},
        {
            "hidden_states": noise(2, 192, 8),
            "img_shapes": [[(1, 8, 8)] * 3] * 2,
            "additional_t_cond": torch.tensor([0, 1]),
        },
    ),
    of_family("QwenImage21Transformer2DModel", "qwen-image-21"),
    of_family("Krea2Transformer2DModel", "krea2"),
    of_family("ZImageTransformer2DModel", "z-image", sample="x", time="t"),
    of_family("SD3Transformer2DModel", "sd3"),
    of_family("AuraFlowTransformer2DModel", "auraflow"),
    of_family("PixArtTransformer2DModel, with a learned variance", "pixart"),
    entry(
        "PixArtTransformer2DModel",
        PATCHED
        | {
            "attention_head_dim": 12,
            "out_channels": 4,
            "cross_attention_dim": 24,
            "caption_channels": 16,
            "use_additional_conditions": True,
        },
        IMAGE
        | {
            "encoder_attention_mask": MASK,
            "added_cond_kwargs": {
                "resolution": torch.tensor([[64.0, 64.0]] * 2),
                "aspect_ratio": torch.tensor([[1.0]] * 2),
            },
        },
    ),
    entry(
        "DiTTransformer2DModel, with a learned variance",
        PATCHED | {"out_channels": 8, "num_embeds_ada_norm": 8},
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": torch.tensor([500, 500]),
            "class_labels": torch.tensor([1, 5]),
        },
    ),
    entry("CogView3PlusTransformer2DModel", COGVIEW, IMAGE | SIZES | {"original_size": torch.tensor([[64.0, 64]] * 2)}),
    entry(
        "CogView4Transformer2DModel",
        COGVIEW | {"rope_axes_dim": (256, 256)},
        IMAGE | SIZES | {"original_size": torch.tensor([[64.0, 64]] * 2)},
    ),
    entry(
        "GlmImageTransformer2DModel",
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "prior_vq_quantizer_codebook_size": 64,
        },
        IMAGE
        | SIZES
        | {
            "prior_token_id": torch.arange(32).reshape(2, 16),
            "prior_token_drop": torch.zeros(2, 16, dtype=torch.bool),
        },
    ),
    entry(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 16,
            "num_attention_heads": 1,
            "num_layers": 2,
            "ffn_hidden_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_in_dim": 16,
            "rope_axes_dim": (8, 4, 4),
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": STEPS,
            "text_bth": noise(2, 5, 16),
            "text_lens": torch.tensor([5, 3]),
        },
    ),
    entry(
        "HiDreamImageTransformer2DModel",
        HEADS
        | {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "caption_channels": [16, 12],
            "text_emb_dim": 8,
            "num_routed_experts": 2,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timesteps": STEPS,
            "encoder_hidden_states_t5": noise(2, 5, 16),
            "encoder_hidden_states_llama3": noise(2, 2, 5, 12),
            "pooled_embeds": noise(2, 8),
        },
        time="timesteps",
    ),
    entry(
        "HunyuanDiT2DModel, with a learned variance",
        PATCHED
        | {
            "cross_attention_dim": 16,
            "cross_attention_dim_t5": 16,
            "pooled_projection_dim": 8,
            "hidden_size": 16,
            "text_len": 5,
            "text_len_t5": 6,
        },
        IMAGE
        | {
            "text_embedding_mask": MASK,
            "encoder_hidden_states_t5": noise(2, 6, 16),
            "text_embedding_mask_t5": torch.ones(2, 6, dtype=torch.long),
            "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]] * 2),
            "style": torch.tensor([0, 0]),
            "image_rotary_emb": rotary(16, 8),
        },
    ),
    entry(
        "HunyuanImageTransformer2DModel",
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 12,
            "rope_axes_dim": (4, 4),
        },
        IMAGE
        | {
            "encoder_attention_mask": MASK,
            "encoder_hidden_states_2": noise(2, 3, 12),
            "encoder_attention_mask_2": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        },
    ),
    entry(
        "HunyuanImageTransformer2DModel, with an embedded guidance and the next time",
        HEADS
        | {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "rope_axes_dim": (4, 4),
            "guidance_embeds": True,
            "use_meanflow": True,
        },
        IMAGE | GUIDANCE | {"encoder_attention_mask": MASK, "timestep_r": torch.full((2,), 250.0)},
    ),
    entry(
        "Lumina2Transformer2DModel",
        LUMINA | {"num_refiner_layers": 1, "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64), "cap_feat_dim": 16},
        IMAGE | {"timestep": SHARES, "encoder_attention_mask": MASK.bool()},
    ),
    entry(
        "LuminaNextDiT2DModel, with a learned variance",
        LUMINA | {"cross_attention_dim": 16, "learn_sigma": True},
        IMAGE
        | {
            "timestep": SHARES,
            "encoder_mask": MASK,
            "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 384, 384),
            "cross_attention_kwargs": {},
        },
    ),
    entry("SanaTransformer2DModel", SANA | {"sample_size": 8}, IMAGE | {"encoder_attention_mask": MASK}),
    entry(
        "SanaTransformer2DModel, with an embedded guidance",
        SANA | {"sample_size": 8, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
        IMAGE | {"encoder_attention_mask": MASK, "timestep": SHARES, "guidance": torch.full((2,), 0.45)},
    ),
    entry(
        "PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 16, "hidden_size": 16, "num_heads": 2, "depth": 2, "axes_dim": [4, 4]},
        IMAGE | {"timestep": SHARES, "attention_mask": MASK.bool()},
    ),
    entry(
        "NucleusMoEImageTransformer2DModel",
        HEADS
        | {
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (2, 2, 4),
            "dense_moe_strategy": "leave_first_block_dense",
            "num_experts": 4,
            "moe_intermediate_dim": 8,
            "capacity_factors": [2.0, 2.0],
        },
        {
            "hidden_states": noise(2, 16, 16),
            "encoder_hidden_states": noise(2, 5, 16),
            "encoder_hidden_states_mask": MASK,
            "timestep": SHARES,
            "img_shapes": [(1, 4, 4)] * 2,
        },
    ),
    entry(
        "PriorTransformer",
        HEADS | {"num_layers": 2, "embedding_dim": 16, "num_embeddings": 5},
        {
            "hidden_states": noise(2, 16),
            "timestep": STEP,
            "proj_embedding": noise(2, 16),
            "encoder_hidden_states": noise(2, 5, 16),
            "attention_mask": MASK.bool(),
        },
    ),
    entry(
        "JoyImageEditTransformer3DModel",
        JOY,
        {"hidden_states": noise(2, 4, 2, 4, 4), "timestep": STEPS, "encoder_hidden_states": noise(2, 5, 16)},
    ),
    entry(
        "JoyImageEditPlusTransformer3DModel",
        JOY,
        {
            "hidden_states": noise(2, 8, 4, 1, 2, 2),
            "timestep": STEPS,
            "encoder_hidden_states": noise(2, 5, 16),
            "encoder_hidden_states_mask": MASK,
            "shape_list": [[(1, 2, 2), (1, 2, 2)]] * 2,
        },
    ),
    entry(
        "OmniGenTransformer2DModel",
        {
            "in_channels": 4,
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 32,
            "num_layers": 2,
            "pad_token_id": 0,
            "vocab_size": 20,
            "time_step_dim": 16,
            "rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]},
        },
        {
            "hidden_states": noise(2, 4, 8, 8),
            "timestep": SHARES,
            "input_ids": torch.arange(40).reshape(2, 20) % 20,
            "input_img_latents": [noise(1, 4, 8, 8)],
            "input_image_sizes": {0: [[2, 18]]},
            "attention_mask": torch.ones(2, 37, 37),
            "position_ids": torch.arange(37).repeat(2, 1),
        },
    ),
)

ENTRIES: tuple[Entry, ...] = (*UNETS, *IMAGES)
NOT_BUILT: dict[str, str] = {
    "AceStepTransformer1DModel": "not yet tried",
    "AllegroTransformer3DModel": "not yet tried",
    "AnyFlowFARTransformer3DModel": "not yet tried",
    "AnyFlowTransformer3DModel": "not yet tried",
    "BriaFibo2Transformer2DModel": "not yet tried",
    "ChronoEditTransformer3DModel": "not yet tried",
    "CogVideoXTransformer3DModel": "not yet tried",
    "ConsisIDTransformer3DModel": "not yet tried",
    "Cosmos3OmniTransformer": "not yet tried",
    "CosmosTransformer3DModel": "not yet tried",
    "DreamLiteTransformer2DModel": "not yet tried",
    "DreamLiteUNetModel": "not yet tried",
    "EasyAnimateTransformer3DModel": "not yet tried",
    "HeliosTransformer3DModel": "not yet tried",
    "HunyuanDiT2DControlNetModel": "not yet tried",
    "HunyuanDiT2DMultiControlNetModel": "not yet tried",
    "HunyuanVideo15Transformer3DModel": "not yet tried",
    "HunyuanVideoFramepackTransformer3DModel": "not yet tried",
    "HunyuanVideoTransformer3DModel": "not yet tried",
    "Ideogram4Transformer2DModel": "not yet tried",
    "Kandinsky5Transformer3DModel": "not yet tried",
    "Kandinsky6SRTransformer3DModel": "not yet tried",
    "Kandinsky6Transformer3DModel": "not yet tried",
    "LTX2VideoTransformer3DModel": "not yet tried",
    "LTXVideoTransformer3DModel": "not yet tried",
    "LatteTransformer3DModel": "not yet tried",
    "LongCatAudioDiTTransformer": "not yet tried",
    "LongCatAudioDiTVae": "not yet tried",
    "MiniMaxH3Transformer3DModel": "not yet tried",
    "MiniMaxMusic3RVQDepthDecoder": "not yet tried",
    "MiniMaxMusic3Transformer1DModel": "not yet tried",
    "MochiTransformer3DModel": "not yet tried",
    "MotifVideoTransformer3DModel": "not yet tried",
    "MotionAdapter": "not yet tried",
    "RFD4ProteinaTransformer": "not yet tried",
    "SanaVideoTransformer3DModel": "not yet tried",
    "SanaWMLTX2RefinerTransformer3DModel": "not yet tried",
    "SanaWMTransformer3DModel": "not yet tried",
    "SkyReelsV2Transformer3DModel": "not yet tried",
    "StableAudio3DiTModel": "not yet tried",
    "StableAudioDiTModel": "not yet tried",
    "StableCascadeUNet": "not yet tried",
    "T5FilmDecoder": "not yet tried",
    "Transformer2DModel": "not yet tried",
    "TransformerTemporalModel": "not yet tried",
    "UVit2DModel": "not yet tried",
    "WanAnimate2Transformer3DModel": "not yet tried",
    "WanAnimateTransformer3DModel": "not yet tried",
    "WanTransformer3DModel": "not yet tried",
    "WanVACETransformer3DModel": "not yet tried",
}
"""Class name and why it is not built."""
