"""Real diffusers pipelines around the tiny video models. Most are without text encoders and what makes pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import diffusers
import pytest
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines import ltx2
from PIL import Image
from tiny import seeded
from tiny_pipelines import quiet
from tiny_today_checkpoints import qwen_tokenizer
from tiny_video import TEXT_TOKENS, TEXT_WIDTH, build, h3_inputs

WITHOUT = dict.fromkeys(("vae", "text_encoder", "tokenizer"))


def wan_pipeline(experts: int = 1, **changes) -> DiffusionPipeline:
    """Wan 2.1; with two experts Wan 2.2, whose second takes over at half of the noise."""
    models = [build("WanTransformer3DModel")() for _ in range(experts)]
    if experts == 2:
        models[1].proj_out.weight.mul_(0.5)
        changes |= {"transformer_2": models[1], "boundary_ratio": 0.5}
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=1.0
    )
    return quiet(diffusers.WanPipeline(**WITHOUT, transformer=models[0], scheduler=scheduler, **changes))


def hunyuan_pipeline() -> DiffusionPipeline:
    return quiet(
        diffusers.HunyuanVideoPipeline(
            **WITHOUT,
            text_encoder_2=None,
            tokenizer_2=None,
            transformer=build("HunyuanVideoTransformer3DModel")(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        )
    )


def cogvideox_pipeline() -> DiffusionPipeline:
    transformer = build("CogVideoXTransformer3DModel")()
    return quiet(
        diffusers.CogVideoXPipeline(**WITHOUT, transformer=transformer, scheduler=diffusers.CogVideoXDDIMScheduler())
    )


def mochi_pipeline() -> DiffusionPipeline:
    return quiet(
        diffusers.MochiPipeline(
            **WITHOUT,
            transformer=build("MochiTransformer3DModel")(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        )
    )


def ltx2_pipeline() -> DiffusionPipeline:
    """Its autoencoders only scale the latents here. Connectors make the prompts of the video and of the audio.

    It makes three passes over a step: with and without the prompt in one batch, with attention perturbed in a block,
    and without attention between video and audio.
    """
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 3,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, mel_bins=8
    )
    connectors = ltx2.connectors.LTX2TextConnectors(
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=1,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=16,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=16,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
    )
    return quiet(
        diffusers.LTX2Pipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=vae,
            audio_vae=audio_vae,
            text_encoder=None,
            tokenizer=None,
            connectors=seeded(lambda: connectors),
            transformer=build("LTX2VideoTransformer3DModel", perturbed_attn=True)(),
            vocoder=None,
        )
    )


def hunyuan15_pipeline(image: bool = False, **guidance) -> DiffusionPipeline:
    """Complete: two text encoders, with an image also that of images. Guidance is that of diffusers' guiders.

    Its tokenizer has a token for every byte, so that the system prompt is shortened, and with it what is cut off.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = _hunyuan15_texts() | (_hunyuan15_images() if image else {})
        vae = diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8,) * 5, layers_per_block=1, scaling_factor=1.0
        )
    kind = diffusers.HunyuanVideo15ImageToVideoPipeline if image else diffusers.HunyuanVideo15Pipeline
    pipe = kind(
        **parts,
        vae=vae,
        transformer=build("HunyuanVideo15Transformer3DModel", in_channels=9, patch_size=1, target_size=64)(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=2.0, **guidance),
    )
    pipe.system_message = "Describe."
    start = f"<|im_start|>system\n{pipe.system_message}<|im_end|>\n<|im_start|>user\n"
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(start).input_ids)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 12, 8, 4
    return quiet(pipe)


def _hunyuan15_texts() -> dict:
    tokenizer, tokenizer_2 = qwen_tokenizer(), transformers.ByT5Tokenizer()
    encoder = transformers.Qwen2_5_VLTextModel(
        transformers.Qwen2_5_VLTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_scaling={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    encoder_2 = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=len(tokenizer_2), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    return {
        "text_encoder": encoder.eval(),
        "tokenizer": tokenizer,
        "text_encoder_2": encoder_2.eval(),
        "tokenizer_2": tokenizer_2,
    }


def _hunyuan15_images() -> dict:
    """Four tokens of an image."""
    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config).eval(),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 8, "width": 8}),
    }


PIPELINES = {
    "wan": wan_pipeline,
    "hunyuan": hunyuan_pipeline,
    "hunyuan15": hunyuan15_pipeline,
    "hunyuan15-image": partial(hunyuan15_pipeline, image=True),
    "cogvideox": cogvideox_pipeline,
    "mochi": mochi_pipeline,
    "ltx2": ltx2_pipeline,
}
SIZES = {"MochiPipeline": (19, 64), "LTX2Pipeline": (25, 128)}
"""Pixel frames that make 4 of the latent, and pixels of a side that make 4 tokens. 13 and 64 for the others."""


def prompts(pipe: DiffusionPipeline, seed: int) -> dict:
    """Random prompts, also negative ones, as this pipeline takes them. Those with text encoders take them as text."""
    generator = torch.Generator().manual_seed(seed)
    if type(pipe).__name__.startswith("HunyuanVideo15"):
        return {"prompt": f'a cat with a "{seed}"', "negative_prompt": "a dull dog"}
    name, mask = type(pipe).__name__, torch.ones(1, TEXT_TOKENS, dtype=torch.bool)
    width = 64 if name == "MochiPipeline" else TEXT_WIDTH
    embeds = {f"{which}prompt_embeds": torch.randn(1, TEXT_TOKENS, width, generator=generator) for which in WHICH}
    if name == "HunyuanVideoPipeline":
        embeds |= {f"{which}pooled_prompt_embeds": torch.randn(1, 8, generator=generator) for which in WHICH}
        embeds |= {"true_cfg_scale": 2.0}
    if name == "LTX2Pipeline":
        embeds |= {"spatio_temporal_guidance_blocks": [1]}
    if name in ("HunyuanVideoPipeline", "MochiPipeline", "LTX2Pipeline"):
        embeds |= {f"{which}prompt_attention_mask": mask for which in WHICH}
    return embeds


WHICH = ("", "negative_")


def generate(pipe: DiffusionPipeline, steps: int = 4, seed: int = 0, **arguments) -> torch.Tensor:
    """Latents of 4 frames of 4×4 tokens."""
    frames, side = SIZES.get(type(pipe).__name__, (13, 64))
    size = {"height": side, "width": side}
    if "ImageToVideo" in type(pipe).__name__:  # it takes the size of the image
        noise = torch.randint(256, (side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        size = {"image": Image.fromarray(noise.numpy())}
    settings = size | {
        "num_frames": frames,
        "num_inference_steps": steps,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
    }
    return pipe(**settings | prompts(pipe, seed) | arguments, return_dict=False)[0]


def h3_pipeline() -> tuple[DiffusionPipeline, Callable[[], torch.Tensor]]:
    """The denoising loop of MiniMax-H3, a modular pipeline, with one keyframe; and what runs it for four steps."""
    if not hasattr(diffusers, "MiniMaxH3Scheduler"):
        pytest.skip("this diffusers has no MiniMaxH3Scheduler")
    from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseStep
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    pipe = MiniMaxH3DenoiseStep().init_pipeline()
    schedulers = {name: diffusers.MiniMaxH3Scheduler() for name in ("scheduler", "audio_scheduler")}
    pipe.update_components(transformer=build("MiniMaxH3Transformer3DModel")(), **schedulers)
    inputs = h3_inputs(batch=1)

    def run() -> torch.Tensor:
        state = PipelineState()
        for name in ("token_tags", "position_ids", "video_indices", "audio_indices", "text_indices"):
            state.set(name, inputs[name], "denoiser_input_fields")
        for scheduler in schedulers.values():
            scheduler.set_timesteps(5)  # of which the last is the end
        timesteps = pipe.scheduler.timesteps
        return pipe(
            state=state,
            latents=inputs["hidden_states"][0].clone(),
            audio_latents=inputs["audio_hidden_states"][0].clone(),
            prompt_embeds=inputs["encoder_hidden_states"],
            row_timestep_plan=[(torch.tensor([0.9, t, t / 2]), inputs["timestep_indices"]) for t in timesteps],
            timesteps=timesteps,
            audio_timesteps=pipe.audio_scheduler.timesteps,
            num_condition_video_rows=16,
            output="latents",
        )

    return pipe, run


def pipeline(name: str) -> DiffusionPipeline:
    try:
        return PIPELINES[name]()
    except AttributeError as missing:
        pytest.skip(f"this diffusers has no {missing.name}")
