"""Stage `export` of the Flux-class model: a folder that `toma_diffusion_demo.loading.flux_pipeline` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import torch
from diffusers import AutoencoderKL, ModelMixin
from PIL import Image
from safetensors.torch import save_file
from toma_diffusion_demo.loading import SCALE, WEIGHTS, DemoFluxPipeline, build_flux_pipeline, flux_pipeline
from torch import Tensor

from training.export import MIB, ModelTooLargeError, folder_mib, history_of, millions, table_line, tidy
from training.flux import load_text_encoder
from training.loop import HISTORY, Place, averaged
from training.models import build_flow_scheduler, build_flux
from training.samples import decibels, draw, prompts
from training.settings import FluxSettings

MAX_MIB = 13.0
CARD = Path(__file__).with_name("flux_card.md")
COMPARED = 16
"""Prompts drawn with whole and with stored weights."""


def quantised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are stored: matrices in 8 bits with a scale a row, all else in half precision."""
    stored = {}
    for name, tensor in weights.items():
        if tensor.ndim != 2:
            stored[name] = tensor.half()
            continue
        scale = (tensor.abs().amax(dim=1) / 127).clamp(min=1e-12)
        stored[name] = (tensor / scale[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale.float()
    return stored


def write_transformer(transformer: ModelMixin, folder: Path) -> None:
    """Write its configuration and its weights."""
    transformer.save_config(folder)
    weights = {name: tensor.detach().float().cpu().contiguous() for name, tensor in transformer.state_dict().items()}
    save_file(quantised(weights), folder / WEIGHTS)


def flux_arguments(pipeline: DemoFluxPipeline, count: int, guidance: float) -> dict[str, Any]:
    """What FluxPipeline needs for classifier-free guidance, beyond prompts and steps."""
    return {"true_cfg_scale": guidance, "negative_prompt": [""] * count} if guidance > 1 else {}


def load_exported(place: Place, folder: Path) -> DemoFluxPipeline:
    """The pipeline as a user loads it."""
    pipeline = flux_pipeline(torch.bfloat16 if place.device.type == "cuda" else torch.float32, folder, place.text)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(place.device)
    return pipeline


def similarity(settings: FluxSettings, place: Place, whole: DemoFluxPipeline, folder: Path) -> float:
    """The PSNR of images by the stored weights against those by the trained ones, in dB."""
    whole.set_progress_bar_config(disable=True)
    images: list[list[Image.Image]] = []
    for pipeline in (whole.to(place.device), flux_pipeline(torch.float32, folder, place.text).to(place.device)):
        pipeline.set_progress_bar_config(disable=True)
        images.append(draw(pipeline, prompts()[::4][:COMPARED], settings.seed, 20, 4.0, flux_arguments))
    return decibels(*images)


def export_flux(settings: FluxSettings, place: Place, max_mib: float = MAX_MIB) -> Path:
    """Write the folder `pipeline`, unless it is too large or does not generate images.

    Raises:
        ModelTooLargeError: The folder would be larger than `max_mib`.
    """
    transformer = build_flux(settings, load_text_encoder(place).config.hidden_size)
    state = averaged(transformer, place.work / "diffusion.pt")
    vae = AutoencoderKL.from_pretrained(place.work / "vae", local_files_only=True)
    scheduler = build_flow_scheduler(settings)
    folder, unfinished = place.work / "pipeline", place.work / "pipeline.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    scheduler.save_pretrained(unfinished / "scheduler")
    write_transformer(transformer, unfinished / "transformer")
    vae.half().save_pretrained(unfinished / "vae")
    vae.float()
    tidy(unfinished)
    history = history_of("transformer", state, place)
    (unfinished / HISTORY).write_text(json.dumps(history, indent=2) + "\n")
    assert place.text is not None
    likeness = similarity(settings, place, build_flux_pipeline(transformer, vae, scheduler, place.text), unfinished)
    (unfinished / "README.md").write_text(
        Template(CARD.read_text()).substitute(
            transformer=millions(transformer),
            vae=millions(vae),
            tokens=f"{(settings.latent_size // 2) ** 2:,}",
            joint=settings.joint_blocks,
            single=settings.single_blocks,
            width=settings.heads * settings.head_channels,
            shift=f"{settings.shift:g}",
            image_size=settings.image_size,
            images=f"{max(each['different_images'] for each in history):,}",
            small_share=f"{settings.small_share:.0%}",
            likeness=f"{likeness:.1f}",
            history="\n".join(table_line(each) for each in history),
        )
    )
    size = folder_mib(unfinished)
    if size > max_mib:
        raise ModelTooLargeError(f"{unfinished} has {size:.1f} MiB, and at most {max_mib:g} are allowed.")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    stored = (folder / "transformer" / WEIGHTS).stat().st_size / MIB
    print(
        f"export: {folder}, {size:.1f} of at most {max_mib:g} MiB, of which {stored:.1f} the transformer; "
        f"8 bits against whole weights: {likeness:.1f} dB",
        flush=True,
    )
    return folder
