"""The published models that are known by name: their configurations, and small ones of the same structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ClipSize = tuple[int, int, int]
"""Width, height and frames."""


@dataclass(frozen=True)
class Published:
    """One of the models known by name."""

    class_name: str
    config: Mapping[str, Any]
    """The settings of the published checkpoint that differ from the class's defaults."""
    small: Mapping[str, Any]
    """Changes for a small model of the same structure, for CPUs."""
    batch: int = 1
    """Batch size of one call: 2 if the pipeline puts both halves of classifier-free guidance into one call."""
    resolution: int = 1024
    small_resolution: int = 256
    clip: ClipSize | None = None
    """Of a model of clips, in place of the resolution."""
    small_clip: ClipSize | None = None


SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
SMALL_SDXL = {
    "block_out_channels": (32, 64, 128),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 4),
    "cross_attention_dim": 64,
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 64 + 6 * 32,
}
SMALL_SD15 = {
    "block_out_channels": (32, 64, 128, 128),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 64,
}
# Six and ten blocks, because the first five of each kind are left alone by default.
SMALL_FLUX = {
    "num_layers": 6,
    "num_single_layers": 10,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 12, 12),
}
SD35_LARGE = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 38,
    "attention_head_dim": 64,
    "num_attention_heads": 38,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
SMALL_SD35 = {
    "num_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 64,
}
# From here on the defaults of diffusers' classes are those of the published models, but for what is named.
FLUX2_KLEIN = {"attention_head_dim": 128, "guidance_embeds": False}
FLUX2_KLEIN_9B = {
    **FLUX2_KLEIN,
    "num_layers": 8,
    "num_single_layers": 24,
    "num_attention_heads": 32,
    "joint_attention_dim": 3 * 4096,
}
FLUX2_KLEIN_4B = {
    **FLUX2_KLEIN,
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 3 * 2560,
}
SMALL_WIDTH = {"attention_head_dim": 32, "num_attention_heads": 4}
SMALL_TEXT = {"joint_attention_dim": 128}
SMALL_FLUX2 = {"num_layers": 2, "num_single_layers": 4, **SMALL_WIDTH, **SMALL_TEXT, "axes_dims_rope": (8, 8, 8, 8)}
SMALL_CHROMA = {
    "num_layers": 2,
    "num_single_layers": 4,
    **SMALL_WIDTH,
    **SMALL_TEXT,
    "axes_dims_rope": (8, 12, 12),
    "approximator_hidden_dim": 128,
    "approximator_layers": 2,
}
SMALL_QWEN = {"num_layers": 4, **SMALL_WIDTH, **SMALL_TEXT, "axes_dims_rope": (8, 12, 12)}
SMALL_QWEN21 = {"num_layers": 4, **SMALL_WIDTH, "context_in_dim": 128, "axes_dims_rope": (8, 12, 12)}
SMALL_Z_IMAGE = {
    "n_layers": 4,
    "n_refiner_layers": 1,
    "dim": 128,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 128,
    "axes_dims": [8, 12, 12],
}
SMALL_KREA2 = {
    "num_layers": 4,
    **SMALL_WIDTH,
    "num_key_value_heads": 1,
    "intermediate_size": 320,
    "text_hidden_dim": 64,
    "num_text_layers": 2,
    "text_num_attention_heads": 2,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 128,
    "axes_dims_rope": (8, 12, 12),
}
SMALL_AURA_FLOW = {
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 4,
    **SMALL_WIDTH,
    **SMALL_TEXT,
    "caption_projection_dim": 128,
}
WAN_TI2V_5B = {
    "num_attention_heads": 24,
    "in_channels": 48,
    "out_channels": 48,
    "ffn_dim": 14336,
    "num_layers": 30,
}
SMALL_WAN = {"num_layers": 4, **SMALL_WIDTH, "text_dim": 128, "freq_dim": 64, "ffn_dim": 256}
SMALL_LTX2 = {
    "num_layers": 4,
    **SMALL_WIDTH,
    "cross_attention_dim": 128,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 64,
    "caption_channels": 128,
}
SMALL_H3 = {
    "num_layers": 4,
    **SMALL_WIDTH,
    "hidden_size": 128,
    "num_refiner_layers": 1,
    "ffn_dim": 256,
    "text_dim": 128,
    "freq_dim": 64,
    "time_embed_hidden_dim": 128,
    "time_embed_dim": 64,
    "rope_freq_dim": 4,
}
SMALL_HUNYUAN15 = {
    "num_layers": 4,
    **SMALL_WIDTH,
    "num_refiner_layers": 1,
    "text_embed_dim": 128,
    "text_embed_2_dim": 64,
    "image_embed_dim": 64,
    "rope_axes_dim": (8, 12, 12),
}
UNET, FLUX, SD3 = "UNet2DConditionModel", "FluxTransformer2DModel", "SD3Transformer2DModel"
FLUX2, FLUX3, CHROMA = "Flux2Transformer2DModel", "Flux3Transformer2DModel", "ChromaTransformer2DModel"
QWEN, QWEN21, Z_IMAGE = "QwenImageTransformer2DModel", "QwenImage21Transformer2DModel", "ZImageTransformer2DModel"
KREA2, AURA_FLOW = "Krea2Transformer2DModel", "AuraFlowTransformer2DModel"
WAN, LTX2 = "WanTransformer3DModel", "LTX2VideoTransformer3DModel"
H3, HUNYUAN15 = "MiniMaxH3Transformer3DModel", "HunyuanVideo15Transformer3DModel"
MODELS: Mapping[str, Published] = {
    "sdxl": Published(UNET, SDXL, SMALL_SDXL, batch=2, small_resolution=512),
    "sd15": Published(UNET, {"sample_size": 64, "cross_attention_dim": 768}, SMALL_SD15, batch=2, resolution=512),
    "flux": Published(FLUX, {"guidance_embeds": True}, SMALL_FLUX),
    "sd35": Published(SD3, SD35_LARGE, SMALL_SD35, batch=2),
    "flux2": Published(FLUX2, {}, SMALL_FLUX2),
    "flux2-klein": Published(FLUX2, FLUX2_KLEIN_9B, SMALL_FLUX2),
    "flux2-klein-4b": Published(FLUX2, FLUX2_KLEIN_4B, SMALL_FLUX2),
    "flux3": Published(FLUX3, {}, SMALL_FLUX2),
    "qwen-image": Published(QWEN, {}, SMALL_QWEN, resolution=1328),
    "qwen-image-21": Published(QWEN21, {}, SMALL_QWEN21),
    "z-image": Published(Z_IMAGE, {}, SMALL_Z_IMAGE, batch=2),
    "krea2": Published(KREA2, {}, SMALL_KREA2),
    "chroma": Published(CHROMA, {}, SMALL_CHROMA),
    "auraflow": Published(AURA_FLOW, {"pos_embed_max_size": 96 * 96}, SMALL_AURA_FLOW, batch=2),
    "wan": Published(WAN, {}, SMALL_WAN, clip=(1280, 720, 81), small_clip=(192, 128, 9)),
    "wan-480p": Published(WAN, {}, SMALL_WAN, clip=(832, 480, 81), small_clip=(192, 128, 9)),
    "wan-ti2v-5b": Published(WAN, WAN_TI2V_5B, SMALL_WAN, clip=(1280, 704, 121), small_clip=(256, 192, 9)),
    "ltx2": Published(LTX2, {}, SMALL_LTX2, batch=2, clip=(768, 512, 121), small_clip=(256, 192, 17)),
    "h3": Published(H3, {}, SMALL_H3, clip=(1344, 768, 124), small_clip=(256, 192, 22)),
    "hunyuan15": Published(HUNYUAN15, {}, SMALL_HUNYUAN15, clip=(848, 480, 121), small_clip=(192, 128, 9)),
}
