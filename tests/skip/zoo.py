"""A tiny real instance, with a real call, of every denoiser that the installed diffusers exports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina, get_3d_rotary_pos_embed_allegro
from tiny import EVERY_FAMILY, VIDEO, ids, lively
from torch import nn

WRITTEN_FOR = "0.42"
"""The diffusers that has all of these classes. The tests skip those that an older one lacks."""
WORDS = ("Transformer", "UNet", "Unet", "UVit", "DiT", "Diffus")
"""A class that diffusers exports may be a denoiser if its name holds one of these, or if it is defined here:"""
MODULES = ("diffusers.models.transformers.", "diffusers.models.unets.")


@dataclass(frozen=True)
class Entry:
    """A denoiser: how to build a tiny one and how its pipeline calls it."""

    name: str
    """The class, and what is special about a variant: "Kandinsky6Transformer3DModel, with sound"."""
    build: Callable[[], nn.Module]
    """Seeded by the caller."""
    inputs: Callable[[torch.Generator], dict[str, Any]]
    """Keyword arguments of one call of `forward`. Make them anew for every call: models write into caches that are
    among them."""

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


def noise(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    """A random tensor that is drawn when the arguments are made."""
    return lambda generator: torch.randn(shape, generator=generator)


def filled(value: Any, generator: torch.Generator) -> Any:
    """A description of arguments with its random tensors drawn. The others are copied."""
    if isinstance(value, dict):
        return {name: filled(item, generator) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(item, generator) for item in value)
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


def entry(name: str, config: dict[str, Any], inputs: dict[str, Any]) -> Entry:
    """The class with this configuration, called with these arguments. `noise` in them is drawn for every call."""
    make = lambda: getattr(diffusers, name.split(",")[0])(**config)  # noqa: E731
    return Entry(name, lambda: whole(make), lambda generator: filled(inputs, generator))


def of_family(
    name: str, family_name: str, config: dict[str, Any] | None = None, inputs: dict[str, Any] | None = None
) -> Entry:
    """A family that the tests of merging build, with changes of its configuration and its arguments."""
    family = next(family for family in [*EVERY_FAMILY, *VIDEO] if family.name == family_name)

    def arguments(generator: torch.Generator) -> dict[str, Any]:
        seed = int(torch.randint(2**31, (), generator=generator))
        return family.inputs(seed=seed) | filled(inputs or {}, generator)

    return Entry(name, lambda: whole(lambda: family.build(**config or {})), arguments)


def rotary(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions that count up."""
    angles = torch.arange(tokens)[:, None] / 10 ** torch.arange(width)[None]
    return angles.cos(), angles.sin()


def allegro_positions(width: int, frames: int, height: int, wide: int) -> tuple[Any, Any]:
    """Frequencies and places along the three axes."""
    *angles, rows, columns, times = get_3d_rotary_pos_embed_allegro(
        width, ((0, 0), (height, wide)), (height, wide), frames, (2.2, 2.0, 2.0)
    )
    places = torch.cartesian_prod(rows.long(), columns.long(), times.long())
    return tuple(angles), tuple(places.T[:, None])


def part_of(module: str, name: str) -> Any:
    """A class that diffusers does not export, looked up when it is needed: older versions lack some."""
    return getattr(import_module(f"diffusers.models.transformers.transformer_{module}"), name)


def far_cache(generator: torch.Generator) -> dict[int, dict[str, torch.Tensor]]:
    """What AnyFlow keeps of a chunk of 2 frames, each of 4×4 tokens."""
    sizes = {"full_cache": 96, "compressed_cache": 4}  # none of the latter is in use yet
    return {
        layer: {name: torch.randn(2, 2, 2, size, 8, generator=generator) for name, size in sizes.items()}
        for layer in range(2)
    }


def refiner_cache(generator: torch.Generator) -> Any:
    """What SanaWM's refiner keeps of the first and of the latest frame, each of 4×4 tokens."""
    cache = part_of("sana_wm_refiner", "SanaWMRefinerKVCache")(2)
    cache.sink_pe = tuple(part[None] for part in rotary(16, 16))
    for layer in cache.layer_caches:
        layer.store_sink(torch.randn(2, 16, 16, generator=generator), torch.randn(2, 16, 16, generator=generator))
        layer.store_history(torch.randn(2, 16, 16, generator=generator), torch.randn(2, 16, 16, generator=generator))
    return cache


def animate_cache(generator: torch.Generator) -> Any:
    """What Wan-Animate 2 keeps of 2 frames of the reference, each of 2×2 tokens."""
    cache = part_of("wan_animate_2", "WanAnimate2KVCache")(2)
    for layer in cache.layer_caches:
        layer.store(torch.randn(1, 8, 2, 16, generator=generator), torch.randn(1, 8, 2, 16, generator=generator))
    return cache


STEPS = torch.full((2,), 500.0)
"""A time between 0 and 1000, for two samples."""
SHARES = torch.full((2,), 0.5)
"""A time between 0 and 1."""

# The tables below would take twice as many lines in the form of the formatter.
# fmt: off

OF_FAMILIES = {
    "UNet2DConditionModel": "sd15", "FluxTransformer2DModel": "flux", "Flux2Transformer2DModel": "flux2",
    "Flux3Transformer2DModel": "flux3", "ChromaTransformer2DModel": "chroma",
    "QwenImageTransformer2DModel": "qwen-image", "QwenImage21Transformer2DModel": "qwen-image-21",
    "Krea2Transformer2DModel": "krea2", "ZImageTransformer2DModel": "z-image", "SD3Transformer2DModel": "sd3",
    "AuraFlowTransformer2DModel": "auraflow", "WanTransformer3DModel": "wan",
    "CogVideoXTransformer3DModel": "cogvideox", "HunyuanVideoTransformer3DModel": "hunyuan",
    "HunyuanVideo15Transformer3DModel": "hunyuan15", "MochiTransformer3DModel": "mochi",
    "MiniMaxH3Transformer3DModel": "h3",
}
"""Those that the tests of merging build."""

# U-Nets

SMALL = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
PIXEL_UNET = SMALL | {"sample_size": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}
UNET = SMALL | {"sample_size": 8, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16, "attention_head_dim": 2}
STEP = torch.tensor(500)
PIXELS = {"sample": noise(2, 3, 8, 8), "timestep": STEP}
LATENTS = {"sample": noise(2, 4, 8, 8), "timestep": STEP, "encoder_hidden_states": noise(2, 5, 16)}
CLIP = {"sample": noise(2, 4, 3, 8, 8), "timestep": STEP, "encoder_hidden_states": noise(2, 5, 16)}
UNETS = (
    entry("UNet2DModel", PIXEL_UNET, PIXELS),
    entry("AudioLDM2UNet2DConditionModel",
        UNET | {"cross_attention_dim": ((None, 16, 24), (None, 16, 24)), "attention_head_dim": 4},
        LATENTS | {"encoder_hidden_states_1": noise(2, 6, 24), "encoder_attention_mask_1": torch.ones(2, 6)}),
    entry("UNet1DModel", {"extra_in_channels": 16, "time_embedding_dim": 16},
        {"sample": noise(2, 2, 64), "timestep": STEP}),
    entry("UNet3DConditionModel",
        UNET | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
        CLIP),
    entry("UNetMotionModel",
        SMALL | {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "cross_attention_dim": 16,
            "num_attention_heads": 2, "motion_num_attention_heads": 2},
        CLIP | {"encoder_hidden_states": noise(6, 5, 16)}),
    entry("UNetSpatioTemporalConditionModel",
        {"block_out_channels": (32, 64),
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "layers_per_block": 1,
            "cross_attention_dim": 16, "num_attention_heads": 2, "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24, "num_frames": 3},
        {"sample": noise(2, 3, 8, 8, 8), "timestep": torch.tensor(1.6), "encoder_hidden_states": noise(2, 1, 16),
            "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2)}),
    entry("I2VGenXLUNet",
        UNET | {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "num_attention_heads": None},
        CLIP | {"fps": torch.tensor([16, 16]), "image_latents": noise(2, 4, 3, 8, 8),
            "image_embeddings": noise(2, 16)}),
    entry("Kandinsky3UNet",
        {"time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 2,
            "block_out_channels": (8, 16), "cross_attention_dim": 16, "encoder_hid_dim": 12},
        LATENTS | {"encoder_hidden_states": noise(2, 5, 12), "encoder_attention_mask": torch.ones(2, 5)}),
    entry("UNetControlNetXSModel",
        {"block_out_channels": (8, 16), "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 16, "num_attention_heads": 2,
            "upcast_attention": False, "ctrl_block_out_channels": (4, 8), "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 2, "ctrl_conditioning_embedding_out_channels": (2, 2)},
        LATENTS | {"controlnet_cond": noise(2, 3, 16, 16), "conditioning_scale": 1.0, "apply_control": True}),
)

# Images

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
PATCHED = HEADS | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2}
IMAGE = {"hidden_states": noise(2, 4, 8, 8), "encoder_hidden_states": noise(2, 5, 16), "timestep": STEPS}
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
"""Of the text: the second prompt is shorter."""
SIZES = {"target_size": torch.tensor([[64.0, 64]] * 2), "crop_coords": torch.zeros(2, 2)}
JOINT = HEADS | {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16,
    "axes_dims_rope": (2, 2, 4)}
TOKENS = {"hidden_states": noise(2, 16, 4), "encoder_hidden_states": noise(2, 5, 16), "timestep": SHARES,
    "img_ids": ids(4, 4, 3), "txt_ids": torch.zeros(5, 3)}
COGVIEW = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 16,
    "condition_dim": 4, "pos_embed_max_size": 8, "sample_size": 8}
GLM = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 16,
    "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64}
JOY = {"patch_size": [1, 2, 2], "in_channels": 4, "hidden_size": 16, "num_attention_heads": 1, "text_dim": 16,
    "num_layers": 2, "rope_dim_list": [4, 6, 6]}
LUMINA = {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_attention_heads": 3,
    "num_kv_heads": 1, "multiple_of": 2}
SANA = HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
CASCADE = {"in_channels": 4, "out_channels": 4, "conditioning_dim": 16, "timestep_ratio_embedding_dim": 16,
    "block_out_channels": (16, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1),
    "up_num_layers_per_block": (1, 1), "clip_text_pooled_in_channels": 16}
PLACES = torch.cat([torch.arange(4)[:, None].repeat(1, 3), 65536 + ids(4, 4, 3)])
"""Of 4 tokens of text and 4×4 of an image: Ideogram gives images numbers of their own."""
IMAGES = (
    entry("BriaTransformer2DModel", JOINT, TOKENS | {"timestep": STEPS}),
    entry("BriaFiboTransformer2DModel", JOINT | {"text_encoder_dim": 8},
        TOKENS | {"timestep": STEPS, "text_encoder_layers": [noise(2, 5, 8)] * 4}),
    entry("LongCatImageTransformer2DModel", JOINT | {"pooled_projection_dim": 16}, TOKENS | {"guidance": None}),
    entry("OvisImageTransformer2DModel", JOINT | {"out_channels": 4}, TOKENS),
    entry("PixArtTransformer2DModel",
        PATCHED | {"attention_head_dim": 12, "out_channels": 4, "cross_attention_dim": 24, "caption_channels": 16,
            "use_additional_conditions": True},
        IMAGE | {"encoder_attention_mask": MASK,
            "added_cond_kwargs": {"resolution": torch.tensor([[64.0, 64.0]] * 2),
                "aspect_ratio": torch.tensor([[1.0]] * 2)}}),
    entry("DiTTransformer2DModel, with a learned variance",
        PATCHED | {"out_channels": 8, "num_embeds_ada_norm": 8},
        {"hidden_states": noise(2, 4, 8, 8), "timestep": torch.tensor([500, 500]),
            "class_labels": torch.tensor([1, 5])}),
    entry("CogView3PlusTransformer2DModel", COGVIEW,
        IMAGE | SIZES | {"original_size": torch.tensor([[64.0, 64]] * 2)}),
    entry("CogView4Transformer2DModel", COGVIEW | {"rope_axes_dim": (256, 256)},
        IMAGE | SIZES | {"original_size": torch.tensor([[64.0, 64]] * 2)}),
    entry("GlmImageTransformer2DModel", GLM,
        IMAGE | SIZES | {"prior_token_id": torch.arange(32).reshape(2, 16),
            "prior_token_drop": torch.zeros(2, 16, dtype=torch.bool)}),
    entry("ErnieImageTransformer2DModel",
        {"hidden_size": 16, "num_attention_heads": 1, "num_layers": 2, "ffn_hidden_size": 16, "in_channels": 4,
            "out_channels": 4, "text_in_dim": 16, "rope_axes_dim": (8, 4, 4)},
        {"hidden_states": noise(2, 4, 8, 8), "timestep": STEPS, "text_bth": noise(2, 5, 16),
            "text_lens": torch.tensor([5, 3])}),
    entry("HiDreamImageTransformer2DModel",
        HEADS | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "caption_channels": [16, 12], "text_emb_dim": 8, "num_routed_experts": 2, "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2), "max_resolution": (8, 8), "llama_layers": (0, 1)},
        {"hidden_states": noise(2, 4, 8, 8), "timesteps": STEPS, "encoder_hidden_states_t5": noise(2, 5, 16),
            "encoder_hidden_states_llama3": noise(2, 2, 5, 12), "pooled_embeds": noise(2, 8)}),
    entry("HunyuanDiT2DModel, with a learned variance",
        PATCHED | {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 8,
            "hidden_size": 16, "text_len": 5, "text_len_t5": 6},
        IMAGE | {"text_embedding_mask": MASK, "encoder_hidden_states_t5": noise(2, 6, 16),
            "text_embedding_mask_t5": torch.ones(2, 6, dtype=torch.long),
            "image_meta_size": torch.tensor([[64.0, 64, 64, 64, 0, 0]] * 2), "style": torch.tensor([0, 0]),
            "image_rotary_emb": rotary(16, 8)}),
    entry("HunyuanImageTransformer2DModel",
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": 16, "text_embed_2_dim": 12, "rope_axes_dim": (4, 4)},
        IMAGE | {"encoder_attention_mask": MASK, "encoder_hidden_states_2": noise(2, 3, 12),
            "encoder_attention_mask_2": torch.tensor([[1, 1, 1], [1, 0, 0]])}),
    entry("Lumina2Transformer2DModel",
        LUMINA | {"num_refiner_layers": 1, "axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64), "cap_feat_dim": 16},
        IMAGE | {"timestep": SHARES, "encoder_attention_mask": MASK.bool()}),
    entry("LuminaNextDiT2DModel, with a learned variance",
        LUMINA | {"cross_attention_dim": 16, "learn_sigma": True},
        IMAGE | {"timestep": SHARES, "encoder_mask": MASK,
            "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 384, 384), "cross_attention_kwargs": {}}),
    entry("SanaTransformer2DModel", SANA | {"sample_size": 8}, IMAGE | {"encoder_attention_mask": MASK}),
    entry("PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 16, "hidden_size": 16, "num_heads": 2, "depth": 2, "axes_dim": [4, 4]},
        IMAGE | {"timestep": SHARES, "attention_mask": MASK.bool()}),
    entry("NucleusMoEImageTransformer2DModel",
        HEADS | {"in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16,
            "axes_dims_rope": (2, 2, 4), "dense_moe_strategy": "leave_first_block_dense", "num_experts": 4,
            "moe_intermediate_dim": 8, "capacity_factors": [2.0, 2.0]},
        {"hidden_states": noise(2, 16, 16), "encoder_hidden_states": noise(2, 5, 16),
            "encoder_hidden_states_mask": MASK, "timestep": SHARES, "img_shapes": [(1, 4, 4)] * 2}),
    entry("PriorTransformer", HEADS | {"num_layers": 2, "embedding_dim": 16, "num_embeddings": 5},
        {"hidden_states": noise(2, 16), "timestep": STEP, "proj_embedding": noise(2, 16),
            "encoder_hidden_states": noise(2, 5, 16), "attention_mask": MASK.bool()}),
    entry("JoyImageEditTransformer3DModel", JOY,
        {"hidden_states": noise(2, 4, 2, 4, 4), "timestep": STEPS, "encoder_hidden_states": noise(2, 5, 16)}),
    entry("JoyImageEditPlusTransformer3DModel", JOY,
        {"hidden_states": noise(2, 8, 4, 1, 2, 2), "timestep": STEPS, "encoder_hidden_states": noise(2, 5, 16),
            "encoder_hidden_states_mask": MASK, "shape_list": [[(1, 2, 2), (1, 2, 2)]] * 2}),
    entry("OmniGenTransformer2DModel",
        {"in_channels": 4, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
            "intermediate_size": 32, "num_layers": 2, "pad_token_id": 0, "vocab_size": 20, "time_step_dim": 16,
            "rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]}},
        {"hidden_states": noise(2, 4, 8, 8), "timestep": SHARES, "input_ids": torch.arange(40).reshape(2, 20) % 20,
            "input_img_latents": [noise(1, 4, 8, 8)], "input_image_sizes": {0: [[2, 18]]},
            "attention_mask": torch.ones(2, 37, 37), "position_ids": torch.arange(37).repeat(2, 1)}),
    entry("BriaFibo2Transformer2DModel",
        {"in_channels": 4, "dim": 16, "n_layers": 3, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 16,
            "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 2, "max_num_gist_tokens": 4,
            "gist_step": 1, "gist_min_text_len": 2, "gist_max_text_len": 8, "axes_dims": (4, 2, 2),
            "axes_lens": (32, 16, 16)},
        {"hidden_states": noise(2, 4, 8, 8), "timestep": SHARES, "encoder_hidden_states": noise(2, 2, 5, 16),
            "encoder_attention_mask": MASK.bool(), "context_latents": [noise(2, 4, 4, 4)]}),
    entry("DreamLiteUNetModel",
        SMALL | {"down_block_types": ("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            "up_block_types": ("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"), "cross_attention_dim": 16,
            "attention_head_dim": 4, "addition_embed_type": "time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 48},
        {"sample": noise(2, 4, 8, 16), "timestep": STEPS, "encoder_hidden_states": noise(2, 5, 16),
            "encoder_attention_mask": MASK,
            "added_cond_kwargs": {"time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}}),
    entry("Ideogram4Transformer2DModel",
        HEADS | {"in_channels": 4, "num_layers": 2, "intermediate_size": 32, "adaln_dim": 16, "llm_features_dim": 16,
            "mrope_section": (2, 1, 1)},
        {"hidden_states": noise(2, 20, 4), "timestep": SHARES, "encoder_hidden_states": noise(2, 20, 16),
            "position_ids": PLACES.long().repeat(2, 1, 1), "segment_ids": torch.ones(2, 20, dtype=torch.long),
            "indicator": torch.tensor([[3] * 4 + [2] * 16] * 2)}),
    entry("Transformer2DModel, of codes",
        HEADS | {"num_layers": 1, "cross_attention_dim": 16, "sample_size": 4, "num_vector_embeds": 9,
            "num_embeds_ada_norm": 100, "norm_type": "ada_norm"},
        {"hidden_states": torch.arange(32).reshape(2, 16) % 9, "encoder_hidden_states": noise(2, 5, 16),
            "timestep": torch.tensor(50)}),
    entry("UVit2DModel",
        {"hidden_size": 16, "cond_embed_dim": 16, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 16, "vocab_size": 10, "codebook_size": 9, "in_channels": 16,
            "block_out_channels": 16, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 32, "sample_size": 4},
        {"input_ids": torch.arange(32).reshape(2, 4, 4) % 10, "encoder_hidden_states": noise(2, 5, 16),
            "pooled_text_emb": noise(2, 16), "micro_conds": torch.tensor([[64.0, 64, 0, 0, 6]] * 2)}),
    entry("UniDiffuserModel",
        HEADS | {"text_dim": 16, "clip_img_dim": 16, "num_text_tokens": 5, "in_channels": 4, "out_channels": 4,
            "num_layers": 2, "sample_size": 8, "patch_size": 2, "use_data_type_embedding": True},
        {"latent_image_embeds": noise(2, 4, 8, 8), "image_embeds": noise(2, 1, 16), "prompt_embeds": noise(2, 5, 16),
            "timestep_img": STEP, "timestep_text": STEP, "data_type": 1}),
    entry("StableCascadeUNet",
        CASCADE | {"clip_image_in_channels": 12, "clip_text_in_channels": 16, "switch_level": (False,)},
        {"sample": noise(2, 4, 4, 4), "timestep_ratio": SHARES, "clip_text_pooled": noise(2, 1, 16),
            "clip_text": noise(2, 5, 16), "clip_img": noise(2, 1, 12)}),
)

# Videos

FRAMES = {"hidden_states": noise(2, 4, 3, 8, 8), "timestep": STEPS, "encoder_hidden_states": noise(2, 5, 16)}
FRAMES_FIRST = FRAMES | {"hidden_states": noise(2, 3, 4, 8, 8)}
WAN = HEADS | {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
OF_IMAGE = {"image_dim": 12, "added_kv_proj_dim": 16}
IMAGE_AND_TEXT = {"encoder_hidden_states": noise(2, 512, 16), "encoder_hidden_states_image": noise(2, 3, 12)}
"""Attention takes the last 512 tokens as those of the text."""
LTX = {"num_frames": 3, "height": 4, "width": 4}
COSMOS = HEADS | {"attention_head_dim": 12, "in_channels": 5, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2.0,
    "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 16, 16), "concat_padding_mask": False}
KANDINSKY = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 12, "time_dim": 16,
    "model_dim": 16, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 2, 2)}
KANDINSKY6 = KANDINSKY | {"in_audio_dim": 6, "out_audio_dim": 6, "ca_rope": True, "cross_gates": True,
    "fix_modulation": True, "visual_token_type_num_embeddings": 2}
KANDINSKY_FRAMES = {"hidden_states": noise(2, 3, 8, 8, 9), "encoder_hidden_states": noise(2, 5, 16),
    "pooled_projections": noise(2, 12), "timestep": STEPS,
    "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)]}
CAMERA = torch.cat([torch.eye(4).flatten(), torch.tensor([4.0, 4.0, 2.0, 2.0])])
"""A pose, focal lengths and the centre."""
SKYREELS = WAN | {"freq_dim": 256}
EASY = HEADS | {"attention_head_dim": 16, "out_channels": 4, "mmdit_layers": 1, "num_layers": 2, "patch_size": 2,
    "text_embed_dim": 16, "time_embed_dim": 16}
VIDEOS = (
    entry("WanVACETransformer3DModel", WAN | {"vace_layers": [0], "vace_in_channels": 12},
        FRAMES | {"control_hidden_states": noise(2, 12, 3, 8, 8), "control_hidden_states_scale": torch.tensor([0.5])}),
    entry("WanAnimateTransformer3DModel",
        WAN | OF_IMAGE | {"in_channels": 12, "latent_channels": 4,
            "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_encoder_size": 16, "motion_style_dim": 8,
            "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2},
        FRAMES | IMAGE_AND_TEXT | {"hidden_states": noise(2, 12, 3, 8, 8), "pose_hidden_states": noise(2, 4, 2, 8, 8),
            "face_pixel_values": noise(2, 3, 5, 16, 16)}),
    entry("ChronoEditTransformer3DModel", WAN | OF_IMAGE | {"in_channels": 12},
        FRAMES | IMAGE_AND_TEXT | {"hidden_states": noise(2, 12, 3, 8, 8)}),
    entry("SkyReelsV2Transformer3DModel", SKYREELS, FRAMES),
    entry("AnyFlowTransformer3DModel", WAN,
        FRAMES_FIRST | {"timestep": torch.full((2, 3), 500.0), "r_timestep": torch.full((2, 3), 250.0)}),
    entry("HeliosTransformer3DModel", WAN | {"rope_dim": (4, 2, 2)},
        FRAMES | {"indices_hidden_states": torch.arange(8, 11)[None],
            "indices_latents_history_short": torch.arange(6, 8)[None],
            "indices_latents_history_mid": torch.arange(4, 6)[None],
            "indices_latents_history_long": torch.arange(4)[None], "latents_history_short": noise(2, 4, 2, 8, 8),
            "latents_history_mid": noise(2, 4, 2, 8, 8), "latents_history_long": noise(2, 4, 4, 8, 8)}),
    entry("ConsisIDTransformer3DModel",
        HEADS | {"in_channels": 8, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 16, "num_layers": 2,
            "sample_width": 8, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 5,
            "use_rotary_positional_embeddings": True, "is_train_face": True, "cross_attn_dim_head": 8,
            "cross_attn_num_heads": 2, "LFE_id_dim": 6, "LFE_vit_dim": 8, "LFE_depth": 2, "LFE_dim_head": 8,
            "LFE_num_heads": 2, "LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 10, "LFE_ff_mult": 1,
            "LFE_num_scale": 2},
        FRAMES_FIRST | {"hidden_states": noise(2, 3, 8, 8, 8), "image_rotary_emb": rotary(48, 8),
            "id_cond": noise(2, 6), "id_vit_hidden": [noise(2, 4, 8), noise(2, 4, 8)]}),
    entry("HunyuanVideoFramepackTransformer3DModel",
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
            "text_embed_dim": 16, "pooled_projection_dim": 12, "rope_axes_dim": (4, 2, 2), "has_image_proj": True,
            "image_proj_dim": 12, "has_clean_x_embedder": True},
        FRAMES | {"encoder_attention_mask": MASK, "pooled_projections": noise(2, 12), "image_embeds": noise(2, 3, 12),
            "indices_latents": torch.arange(1, 4), "guidance": torch.full((2,), 6000.0),
            "latents_clean": noise(2, 4, 2, 8, 8), "indices_latents_clean": torch.tensor([0, 4]),
            "latents_history_2x": noise(2, 4, 2, 8, 8), "indices_latents_history_2x": torch.arange(5, 7),
            "latents_history_4x": noise(2, 4, 4, 8, 8), "indices_latents_history_4x": torch.arange(7, 11)}),
    entry("AllegroTransformer3DModel",
        HEADS | {"attention_head_dim": 24, "num_layers": 2, "cross_attention_dim": 48, "sample_width": 8,
            "sample_height": 8, "sample_frames": 3, "caption_channels": 16},
        FRAMES | {"encoder_attention_mask": MASK, "image_rotary_emb": allegro_positions(24, 3, 4, 4)}),
    entry("LatteTransformer3DModel, with a learned variance",
        PATCHED | {"out_channels": 8, "cross_attention_dim": 16, "caption_channels": 16, "attention_bias": True,
            "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "num_embeds_ada_norm": 1000,
            "activation_fn": "gelu-approximate", "video_length": 3},
        FRAMES | {"enable_temporal_attentions": True}),
    entry("EasyAnimateTransformer3DModel", EASY | {"in_channels": 4}, FRAMES),
    entry("CosmosTransformer3DModel", COSMOS | {"in_channels": 4},
        FRAMES | {"fps": 30, "padding_mask": torch.zeros(1, 1, 64, 64)}),
    entry("LTXVideoTransformer3DModel",
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 16,
            "caption_channels": 16},
        FRAMES | LTX | {"hidden_states": noise(2, 48, 4), "encoder_attention_mask": MASK,
            "rope_interpolation_scale": (8 / 25, 32, 32)}),
    of_family("LTX2VideoTransformer3DModel", "ltx2", inputs={"sigma": STEPS, "fps": 24.0}),
    entry("MotifVideoTransformer3DModel",
        HEADS | {"in_channels": 9, "out_channels": 4, "num_layers": 1, "num_single_layers": 2, "num_decoder_layers": 1,
            "text_embed_dim": 16, "image_embed_dim": 12, "rope_axes_dim": (4, 2, 2),
            "enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True},
        FRAMES | {"hidden_states": noise(2, 9, 3, 8, 8), "encoder_attention_mask": MASK.bool(),
            "image_embeds": noise(2, 3, 12)}),
    entry("SanaVideoTransformer3DModel",
        SANA | {"attention_head_dim": 12, "cross_attention_head_dim": 12, "cross_attention_dim": 24, "sample_size": 8,
            "rope_max_seq_len": 32},
        FRAMES | {"encoder_attention_mask": MASK}),
    entry("SanaWMTransformer3DModel",
        {"in_channels": 4, "num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "softmax_every_n": 2,
            "linear_head_dim": 8, "chunk_plucker_channels": 6, "caption_channels": 16},
        {"hidden_states": noise(2, 4, 3, 4, 4), "timestep": torch.tensor([[[0.0, 500.0, 500.0]]] * 2),
            "encoder_hidden_states": noise(2, 1, 5, 16), "mask": MASK,
            "data_info": {"img_hw": torch.tensor([[128.0, 128.0]])}, "camera_conditions": CAMERA.repeat(2, 3, 1),
            "chunk_plucker": noise(2, 6, 3, 4, 4)}),
    entry("Kandinsky5Transformer3DModel", KANDINSKY | {"visual_cond": True},
        KANDINSKY_FRAMES | {"text_rope_pos": torch.arange(5), "scale_factor": (1.0, 2.0, 2.0), "sparse_params": None}),
    entry("Kandinsky6Transformer3DModel, with sound", KANDINSKY6,
        KANDINSKY_FRAMES | {"audio_hidden_states": noise(2, 7, 6), "encoder_attention_mask": MASK.bool(),
            "visual_token_type_ids": torch.tensor([[0, 0, 1]] * 2)}),
    entry("Kandinsky6SRTransformer3DModel",
        {"in_visual_dim": 4, "out_visual_dim": 8, "time_dim": 16, "model_dim": 32, "ff_dim": 32, "num_visual_blocks": 2,
            "axes_dims": (4, 6, 6), "nabla_window": (3, 3, 3)},
        {"hidden_states": noise(2, 2, 8, 16, 9), "timestep": STEPS}),
)

# Sounds

SOUNDS = (
    entry("AceStepTransformer1DModel",
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
            "sliding_window": 4},
        {"hidden_states": noise(2, 16, 4), "timestep": SHARES, "timestep_r": SHARES,
            "encoder_hidden_states": noise(2, 5, 16), "context_latents": noise(2, 16, 8)}),
    entry("LongCatAudioDiTTransformer",
        {"dit_dim": 16, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 4},
        {"hidden_states": noise(2, 16, 4), "encoder_hidden_states": noise(2, 5, 16),
            "encoder_attention_mask": MASK.bool(), "timestep": SHARES,
            "attention_mask": torch.ones(2, 16, dtype=torch.bool), "latent_cond": noise(2, 16, 4)}),
    entry("MiniMaxMusic3Transformer1DModel",
        HEADS | {"in_channels": 4, "condition_dim": 16, "num_layers": 2, "ff_inner_dim": 32, "rotary_dim": 4,
            "fourier_embedding_dim": 8},
        {"hidden_states": noise(2, 4, 16), "timestep": SHARES, "encoder_hidden_states": noise(2, 16, 16)}),
    entry("StableAudioDiTModel",
        HEADS | {"sample_size": 16, "in_channels": 4, "num_layers": 2, "num_key_value_attention_heads": 1,
            "out_channels": 4, "cross_attention_dim": 16, "time_proj_dim": 16, "global_states_input_dim": 12,
            "cross_attention_input_dim": 16},
        {"hidden_states": noise(2, 4, 16), "timestep": torch.tensor([0.5]), "encoder_hidden_states": noise(2, 5, 16),
            "global_hidden_states": noise(2, 1, 12), "rotary_embedding": rotary(17, 4)}),
    entry("StableAudio3DiTModel",
        {"io_channels": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "cond_token_dim": 16, "global_cond_dim": 12,
            "local_add_cond_dim": 5, "timestep_features_dim": 16, "num_memory_tokens": 3},
        {"hidden_states": noise(2, 4, 16), "timestep": SHARES, "encoder_hidden_states": noise(2, 5, 16),
            "global_hidden_states": noise(2, 12), "encoder_attention_mask": MASK.bool(),
            "local_add_cond": noise(2, 5, 16)}),
    entry("T5FilmDecoder",
        {"input_dims": 4, "targets_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32},
        {"encodings_and_masks": [(noise(2, 5, 16), MASK)], "decoder_input_tokens": noise(2, 16, 4),
            "decoder_noise_time": SHARES}),
)

# Those that attend to what earlier calls left behind, or denoise several things at once

COSMOS3 = {"head_dim": 8, "hidden_size": 16, "intermediate_size": 32, "latent_channel": 4, "latent_patch_size": 2,
    "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 16,
    "rope_axes_dim": (2, 1, 1), "vocab_size": 20}
COSMOS3_VIDEO = {"input_ids": torch.arange(5), "text_indexes": torch.arange(5),
    "position_ids": torch.arange(13).repeat(3, 1), "und_len": 5, "sequence_length": 13,
    "vision_tokens": [noise(1, 4, 2, 4, 4)], "vision_token_shapes": [(2, 2, 2)],
    "vision_sequence_indexes": torch.arange(5, 13), "vision_mse_loss_indexes": torch.arange(9, 13),
    "vision_timesteps": torch.full((4,), 500.0), "vision_noisy_frame_indexes": [torch.tensor([1])]}
"""After 5 tokens of text: two frames of 2×2 tokens, the first of which is given."""
PACKED = (
    of_family("Flux2Transformer2DModel, remembering a reference", "flux2",
        inputs={"hidden_states": noise(2, 16 + 64, 8), "img_ids": torch.cat([ids(4, 4, 4, 10), ids(8, 8, 4)]),
            "kv_cache_mode": "extract", "num_ref_tokens": 16}),
    of_family("QwenImage21Transformer2DModel, remembering the text", "qwen-image-21",
        inputs={"kv_cache": lambda _: part_of("qwenimage21", "QwenImage21KVCache")(3), "kv_cache_mode": "extract"}),
    of_family("ZImageTransformer2DModel, with a given picture",
        "z-image",
        {"siglip_feat_dim": 12},
        {"x": [[noise(4, 1, 8, 8), noise(4, 1, 8, 8)]] * 2,
            "cap_feats": [[noise(3, 32), noise(5, 32), noise(2, 32)]] * 2,
            "siglip_feats": [[noise(2, 2, 12), None]] * 2, "image_noise_mask": [[0, 1]] * 2}),
    entry("AnyFlowFARTransformer3DModel", WAN | {"chunk_partition": (2, 2, 2), "rope_max_seq_len": 32},
        {"hidden_states": noise(2, 2, 4, 8, 8), "timestep": torch.full((2, 2), 500.0),
            "r_timestep": torch.full((2, 2), 250.0), "encoder_hidden_states": noise(2, 5, 16),
            "chunk_partition": [2, 2], "kv_cache": far_cache,
            "kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False}}),
    entry("SanaWMLTX2RefinerTransformer3DModel",
        HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 16,
            "caption_channels": 16, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16},
        {"hidden_states": noise(2, 32, 4), "encoder_hidden_states": noise(2, 5, 16),
            "timestep": torch.full((2, 32), 500.0), "video_rotary_emb": tuple(part[None] for part in rotary(32, 16)),
            "encoder_attention_mask": MASK, "kv_cache": refiner_cache, "kv_cache_mode": "inject"}),
    entry("WanAnimate2Transformer3DModel",
        {"text_len": 8, "in_dim": 9, "dim": 32, "ffn_dim": 32, "freq_dim": 16, "text_dim": 16, "out_dim": 4,
            "num_heads": 2, "num_layers": 2},
        {"hidden_states": [noise(4, 3, 4, 4)], "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": [noise(5, 16)], "condition_latents": [noise(5, 3, 4, 4)],
            "kv_cache": animate_cache, "kv_cache_mode": "cached", "seq_len": 12,
            "encoder_hidden_states_image": noise(1, 3, 1280), "reference_grid_sizes": torch.tensor([[2, 2, 2]]),
            "origin_len": 5, "origin_area": [32, 32]}),
    entry("Cosmos3OmniTransformer",
        COSMOS3 | {"sound_gen": True, "sound_dim": 6, "action_gen": True, "action_dim": 3, "num_embodiment_domains": 2},
        COSMOS3_VIDEO | {"position_ids": torch.arange(25).repeat(3, 1), "sequence_length": 25,
            "sound_tokens": [noise(6, 7)], "sound_token_shapes": [(7, 1, 1)],
            "sound_sequence_indexes": torch.arange(13, 20), "sound_mse_loss_indexes": torch.arange(13, 20),
            "sound_timesteps": torch.full((7,), 500.0), "sound_noisy_frame_indexes": [torch.arange(7)],
            "action_tokens": [noise(5, 3)], "action_token_shapes": [(5, 1, 1)],
            "action_sequence_indexes": torch.arange(20, 25), "action_mse_loss_indexes": torch.arange(20, 25),
            "action_timesteps": torch.full((5,), 500.0), "action_noisy_frame_indexes": [torch.arange(5)],
            "action_domain_ids": [torch.tensor([1])]}),
    entry("RFD4ProteinaTransformer",
        {"nlayers": 2, "token_dim": 16, "nheads": 2, "dim_cond": 16, "pair_repr_dim": 16, "latent_dim": 4,
            "token_type_emb_dim": 4, "cath_emb_dim": 4, "t_emb_dim": 16, "tri_mult_c": 8, "num_sequence_classes": 9,
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists", "bond_mask", "molecule_idx_pair")},
        {"bb_ca": noise(2, 6, 3), "local_latents": noise(2, 6, 4), "bb_ca_time": SHARES, "local_latents_time": SHARES,
            "padding_mask": torch.tensor([[True] * 6, [True] * 5 + [False]]),
            "token_type": torch.zeros(2, 6, dtype=torch.long), "atom37_mask": torch.ones(2, 6, 37, dtype=torch.bool),
            "conditioning": {
                "is_in_context_conditioning": torch.tensor([[False] * 5 + [True]] * 2),
                "supports_local_latent": torch.ones(2, 6, dtype=torch.bool), "bond_mask": torch.eye(6).repeat(2, 1, 1),
                "molecule_iid": torch.tensor([[0] * 4 + [1] * 2] * 2)},
            "recycle_depth": 2}),
)
# fmt: on

OF_MERGING = tuple(of_family(*each) for each in OF_FAMILIES.items())
ENTRIES: tuple[Entry, ...] = OF_MERGING + UNETS + IMAGES + VIDEOS + SOUNDS + PACKED

NOT_BUILT: dict[str, str] = {
    "DreamLiteTransformer2DModel": "It is a block of DreamLiteUNetModel.",
    "HunyuanDiT2DControlNetModel": "It is a ControlNet: its output goes into HunyuanDiT2DModel.",
    "HunyuanDiT2DMultiControlNetModel": "It is several ControlNets.",
    "LongCatAudioDiTVae": "It is an autoencoder.",
    "LTX2VideoDiffusionDecoderModel": "It is a decoder that draws the noise and takes all steps in one call.",
    "MiniMaxMusic3RVQDepthDecoder": "It is a language model of codes.",
    "MotionAdapter": "It only carries weights for UNetMotionModel and cannot be called.",
    "TransformerTemporalModel": "It is a block of video U-Nets.",
    "UniDiffuserTextDecoder": "It is a language model that writes captions.",
}
"""Class name and why it is not built."""
