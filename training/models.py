"""Builds the networks from the settings, untrained, and the schedulers that go with them."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from training.settings import FluxSettings, LatentSettings, UNetSettings, WanSettings

INITIAL_LOG_VARIANCE = -6.0
"""A deviation of 0.05."""


def build_vae(settings: LatentSettings) -> AutoencoderKL:
    """The autoencoder. It starts with hardly any noise on its latents.

    Diffusers starts it with noise of deviation 1 on latents that are far smaller, and the decoder first has to learn to
    look through it. The KL term raises the noise later to what the pictures bear.
    """
    levels = len(settings.vae_channels)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=settings.vae_channels,
        layers_per_block=1,
        latent_channels=settings.latent_channels,
        norm_num_groups=settings.vae_channels[0] // 4,  # groups of one channel lose the colour of large even areas
        sample_size=settings.image_size,
        # StableDiffusionPipeline knows a factor and no shift, and one factor for all channels. `normalise` in
        # latents.py puts both into the weights, for every channel, and nothing is left to scale.
        scaling_factor=1.0,
        shift_factor=0.0,  # FluxPipeline needs a number
        force_upcast=False,
        mid_block_add_attention=settings.vae_attention,
    )
    with torch.no_grad():
        vae.quant_conv.weight[settings.latent_channels :] = 0
        vae.quant_conv.bias[settings.latent_channels :] = INITIAL_LOG_VARIANCE
    return vae


def build_unet(settings: UNetSettings) -> UNet2DConditionModel:
    """The denoiser, built as SDXL's: several transformer layers an attention, linear projections, heads of 64."""
    levels = len(settings.unet_channels)
    return UNet2DConditionModel(
        sample_size=settings.latent_size,
        in_channels=settings.latent_channels,
        out_channels=settings.latent_channels,
        down_block_types=("CrossAttnDownBlock2D",) * levels,
        up_block_types=("CrossAttnUpBlock2D",) * levels,
        block_out_channels=settings.unet_channels,
        layers_per_block=1,
        transformer_layers_per_block=settings.transformer_layers,
        # Diffusers' name for it notwithstanding, this is the number of heads.
        attention_head_dim=tuple(channels // settings.head_channels for channels in settings.unet_channels),
        cross_attention_dim=settings.text_channels,
        use_linear_projection=True,
        norm_num_groups=min(32, settings.unet_channels[0] // 2),
    )


def build_flux(settings: FluxSettings, text_channels: int) -> FluxTransformer2DModel:
    """The Flux-class denoiser. Every block starts as one that changes nothing, which trains faster."""
    time_axis = settings.head_channels // 8  # unused by images, as in Flux
    rows = (settings.head_channels - time_axis) // 2
    transformer = FluxTransformer2DModel(
        in_channels=4 * settings.latent_channels,
        num_layers=settings.joint_blocks,
        num_single_layers=settings.single_blocks,
        num_attention_heads=settings.heads,
        attention_head_dim=settings.head_channels,
        joint_attention_dim=text_channels,
        pooled_projection_dim=text_channels,
        axes_dims_rope=(time_axis, rows, rows),
    )
    modulations = [
        module.linear for module in transformer.modules() if type(module).__name__.startswith("AdaLayerNorm")
    ]
    for layer in (*modulations, transformer.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return transformer


def build_wan(settings: WanSettings, text_channels: int, latent_channels: int) -> WanTransformer3DModel:
    """The video model's denoiser. Every block starts as one that changes nothing, which trains faster: what it would
    add is zero, not the gate before it, which starts wide open."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=settings.heads,
        attention_head_dim=settings.head_channels,
        in_channels=latent_channels,
        out_channels=latent_channels,
        text_dim=text_channels,
        freq_dim=256,
        ffn_dim=settings.feed_forward,
        num_layers=settings.blocks,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=128,
    )
    outputs = [
        layer
        for block in transformer.blocks
        for layer in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[-1])
    ]
    for layer in (*outputs, transformer.proj_out, transformer.condition_embedder.time_proj):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    for block in transformer.blocks:
        nn.init.zeros_(block.scale_shift_table)
        nn.init.ones_(block.scale_shift_table[:, 2::3])  # shift, scale and gate, of attention and of feed-forward
    nn.init.zeros_(transformer.scale_shift_table)
    return transformer


def build_flow_scheduler(settings: FluxSettings | WanSettings) -> FlowMatchEulerDiscreteScheduler:
    """Straight lines from noise to image, in Euler steps, with a fixed preference for much noise."""
    return FlowMatchEulerDiscreteScheduler(shift=settings.shift)


def build_text_encoder(settings: UNetSettings, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The text encoder, learnt with the denoiser."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.text_channels,
            intermediate_size=4 * settings.text_channels,
            num_hidden_layers=settings.text_layers,
            num_attention_heads=max(1, settings.text_channels // 64),
            max_position_embeddings=settings.text_tokens,
            projection_dim=settings.text_channels,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_scheduler() -> DDIMScheduler:
    """Velocity prediction down to pure noise.

    Most of our images have a white ground. A schedule whose last step still holds some of the image, as Stable
    Diffusion's does, teaches the model to read the brightness there, and then it cannot draw white from noise. With no
    signal left at the last step, noise prediction would be undefined there, velocity is not; and sampling must begin at
    that last step ("trailing").
    """
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,  # unused with trailing steps; StableDiffusionPipeline warns of any other value
    )
