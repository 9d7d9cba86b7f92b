"""Real diffusers pipelines around the tiny models. Most have no text encoders: prompts are given as embeddings. Latents
come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from PIL import Image
from tiny import (
    TEXT_TOKENS,
    TEXT_WIDTH,
    build,
    flux_transformer,
    h3_inputs,
    missing,
    one,
    pixart_transformer,
    random,
    sd3_transformer,
    sd15_unet,
    sdxl_unet,
    seeded,
)

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def vae(**changes) -> AutoencoderKL:
    """Eight pixels a latent, as the real ones."""
    settings = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "sample_size": 128,
        "shift_factor": 0.0,
    }
    return seeded(lambda: AutoencoderKL(**settings | changes))


def sd15_pipeline(unet: Any = None, pipeline_class: type = StableDiffusionPipeline) -> DiffusionPipeline:
    return quiet(
        pipeline_class(
            vae=vae(),
            text_encoder=None,
            tokenizer=None,
            unet=unet or sd15_unet(),
            scheduler=DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    )


def inpainting_pipeline() -> DiffusionPipeline:
    return sd15_pipeline(sd15_unet(in_channels=9), StableDiffusionInpaintPipeline)


def sdxl_pipeline() -> DiffusionPipeline:
    return quiet(
        StableDiffusionXLPipeline(
            vae=vae(),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=sdxl_unet(),
            scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1),
            add_watermarker=False,
        )
    )


def flux_pipeline() -> DiffusionPipeline:
    return quiet(
        FluxPipeline(
            vae=vae(latent_channels=1),
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            transformer=flux_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    )


def sd3_pipeline() -> DiffusionPipeline:
    return quiet(
        StableDiffusion3Pipeline(
            vae=vae(),
            text_encoder=None,
            text_encoder_2=None,
            text_encoder_3=None,
            tokenizer=None,
            tokenizer_2=None,
            tokenizer_3=None,
            transformer=sd3_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    )


def pixart_pipeline() -> DiffusionPipeline:
    return quiet(
        PixArtAlphaPipeline(
            vae=vae(),
            text_encoder=None,
            tokenizer=None,
            transformer=pixart_transformer(),
            scheduler=DPMSolverMultistepScheduler(),
        )
    )


PIPELINES = {
    "sd15": sd15_pipeline,
    "sdxl": sdxl_pipeline,
    "flux": flux_pipeline,
    "sd3": sd3_pipeline,
    "pixart": pixart_pipeline,
}


def quiet(pipe: DiffusionPipeline) -> DiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoiser(pipe: DiffusionPipeline) -> torch.nn.Module:
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer


def embeds(pipe: DiffusionPipeline, prompts: int = 1, seed: int = 0) -> dict[str, Any]:
    """Random prompts and negative prompts, as the arguments and of the widths that this pipeline takes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(prompts, *shape, generator=generator)

    config = denoiser(pipe).config
    name = type(pipe).__name__
    if name.startswith("PixArt"):
        masks = {f"{which}prompt_attention_mask": torch.ones(prompts, 6) for which in ("", "negative_")}
        width, pooled = config.caption_channels, None
        extra = masks | {"negative_prompt": None, "use_resolution_binning": False}
    elif name.startswith(("Flux", "StableDiffusion3")):
        width, pooled, extra = config.joint_attention_dim, config.pooled_projection_dim, {}
    elif name.startswith("StableDiffusionXL"):
        width, pooled, extra = config.cross_attention_dim, 32, {}
    else:
        width, pooled, extra = config.cross_attention_dim, None, {}
    arguments = {"prompt_embeds": random(6, width), "negative_prompt_embeds": random(6, width), **extra}
    if pooled is not None:
        arguments |= {"pooled_prompt_embeds": random(pooled), "negative_pooled_prompt_embeds": random(pooled)}
    return arguments


def run(pipe: DiffusionPipeline, prompts: int = 1, seed: int = 0, **arguments: Any) -> torch.Tensor:
    """One generation: the same arguments always mean the same noise and the same prompts."""
    settings: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"}
    if "image" not in arguments or "Flux" in type(pipe).__name__:  # the others take the image's size
        settings |= {"height": 128, "width": 128}
    settings |= embeds(pipe, prompts, seed) | {"generator": torch.Generator().manual_seed(seed)}
    return pipe(**settings | arguments, return_dict=False)[0]


def picture(height: int = 128, width: int = 128) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))


def img2img(
    pipe: DiffusionPipeline, pipeline_class: type = diffusers.StableDiffusionImg2ImgPipeline
) -> DiffusionPipeline:
    """Over the same components."""
    extra = {"requires_safety_checker": False} if pipeline_class is diffusers.StableDiffusionImg2ImgPipeline else {}
    return quiet(pipeline_class(**pipe.components, **extra))


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
        transformer = one(self.family).build()
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


def embedded(count: int, prefix: str) -> dict[str, Any]:
    return {f"{prefix}prompt_embeds": text(count, prefix)}


def with_mask(name: str, dtype: torch.dtype = torch.bool) -> Callable[[int, str], dict[str, Any]]:
    """The last of the tokens are padding."""

    def prompt(count: int, prefix: str) -> dict[str, Any]:
        mask = torch.ones(count, TEXT_TOKENS, dtype=dtype)
        mask[:, -2:] = 0
        return embedded(count, prefix) | {f"{prefix}{name}": mask}

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
TODAY_PIPELINES = [
    TinyPipeline("flux2", "flux2", "Flux2Pipeline", embedded, parts=flux2_parts),
    TinyPipeline("flux2-klein", "flux2", "Flux2KleinPipeline", embedded, **GUIDANCE, parts=flux2_parts),
    TinyPipeline(
        "flux2-edit",
        "flux2",
        "Flux2KleinPipeline",
        embedded,
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
    from diffusers.pipelines import ltx2

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
    import transformers
    from tiny_today_checkpoints import qwen_tokenizer

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
    import transformers

    config = transformers.SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config).eval(),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 8, "width": 8}),
    }


VIDEO_PIPELINES = {
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
        return VIDEO_PIPELINES[name]()
    except AttributeError as missing:
        pytest.skip(f"this diffusers has no {missing.name}")
