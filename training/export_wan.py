"""Stage `export` of the video model: a folder that `toma_diffusion_demo.loading.wan_pipeline` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL
from toma_diffusion_demo.loading import DemoWanPipeline, build_wan_pipeline, wan_pipeline

from training.clip_samples import clip_prompts, draw_clips
from training.clip_vae import text_folder
from training.export import ModelTooLargeError, folder_mib, millions, tidy
from training.export_flux import write_transformer
from training.flux import load_text_encoder
from training.loop import HISTORY, Place, averaged
from training.models import build_flow_scheduler, build_wan
from training.samples import decibels
from training.settings import WanSettings

MAX_MIB = 20.0
CARD = Path(__file__).with_name("wan_card.md")
COMPARED = 4
"""Prompts drawn with whole and with stored weights."""


def load_exported(place: Place, folder: Path) -> DemoWanPipeline:
    """The pipeline as a user loads it."""
    if not folder.exists():
        raise FileNotFoundError(f"There is no {folder}: run the stage export first.")
    pipeline = wan_pipeline(folder, torch.bfloat16 if place.device.type == "cuda" else torch.float32, place.text)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(place.device)
    return pipeline


def chapter(stage: str, state: dict[str, Any], clips: int, place: Place) -> dict[str, Any]:
    """What one stage did, for the history."""
    return {
        "stage": stage,
        "seconds": round(state["seconds"], 1),
        "steps": state["step"],
        "frames": state["images"],
        "different_clips": clips,
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "settings": state["settings"],
    }


def history_of(state: dict[str, Any], clips: int, place: Place) -> list[dict[str, Any]]:
    """What the networks went through: if they came from an exported model, its own history first."""
    if place.start:
        earlier = json.loads((place.start / HISTORY).read_text())
    else:
        vae_state = torch.load(place.work / "vae.pt", map_location="cpu", weights_only=True, mmap=True)
        earlier = [chapter("autoencoder", vae_state, clips, place)]
    return [*earlier, chapter("transformer", state, clips, place)]


def table_line(each: dict[str, Any]) -> str:
    """One line of the model card's table."""
    cells = (
        each["stage"],
        f"{each['seconds'] / 60:.1f}",
        f"{each['steps']:,}",
        f"{each['frames']:,} of {each['different_clips']:,} clips",
        f"{each['device']}, torch {each['torch']}",
    )
    return f"| {' | '.join(cells)} |"


def similarity(settings: WanSettings, place: Place, whole: DemoWanPipeline, folder: Path) -> float:
    """The PSNR of frames by the stored weights against those by the trained ones, in dB."""
    drawn = []
    for pipeline in (whole, wan_pipeline(folder, torch.float32, place.text)):
        pipeline.to(place.device).set_progress_bar_config(disable=True)
        clips = draw_clips(pipeline, clip_prompts()[:COMPARED], settings, 10, 4.0)
        drawn.append([frame for clip in clips for frame in clip])
    return decibels(*drawn)


def card(settings: WanSettings, pipeline: DemoWanPipeline, likeness: float, history: list[dict[str, Any]]) -> str:
    """The model card with its figures filled in."""
    return Template(CARD.read_text()).substitute(
        transformer=millions(pipeline.transformer),
        vae=millions(pipeline.vae),
        blocks=settings.blocks,
        width=settings.heads * settings.head_channels,
        frames=settings.frames,
        image_size=settings.image_size,
        tokens=f"{settings.frames * (settings.image_size // 16) ** 2:,}",
        shift=f"{settings.shift:g}",
        likeness=f"{likeness:.1f}",
        clips=f"{max(each['different_clips'] for each in history):,}",
        single=f"{settings.part_ends[0]:.0%}",
        short=f"{settings.part_ends[1]:.0%}",
        short_frames=settings.parts[1],
        history="\n".join(table_line(each) for each in history),
    )


def export_wan(settings: WanSettings, place: Place, max_mib: float = MAX_MIB) -> Path:
    """Write the folder `pipeline`, unless it is too large or does not generate clips.

    Raises:
        ModelTooLargeError: The folder would be larger than `max_mib`.
    """
    latents = torch.load(place.work / "latents.pt", map_location="cpu", weights_only=True, mmap=True)["latents"]
    vae = AutoencoderKL.from_pretrained(place.work / "vae", local_files_only=True)
    transformer = build_wan(settings, load_text_encoder(place).config.hidden_size, latents.shape[2])
    state = averaged(transformer, place.work / "diffusion.pt")
    scheduler = build_flow_scheduler(settings)
    folder, unfinished = place.work / "pipeline", place.work / "pipeline.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    scheduler.save_pretrained(unfinished / "scheduler")
    write_transformer(transformer, unfinished / "transformer")
    vae.half().save_pretrained(unfinished / "vae")
    vae.float()
    index = {
        "_class_name": DemoWanPipeline.__name__,
        "_diffusers_version": diffusers.__version__,
        "scheduler": ["diffusers", type(scheduler).__name__],
        "transformer": ["diffusers", type(transformer).__name__],
        "vae": ["diffusers", type(vae).__name__],
    }
    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    tidy(unfinished)

    history = history_of(state, len(latents), place)
    (unfinished / HISTORY).write_text(json.dumps(history, indent=2) + "\n")
    whole = build_wan_pipeline(transformer, vae, scheduler, text_folder(place))
    likeness = similarity(settings, place, whole, unfinished)
    (unfinished / "README.md").write_text(card(settings, whole, likeness, history))
    size = folder_mib(unfinished)
    if size > max_mib:
        raise ModelTooLargeError(f"{unfinished} has {size:.1f} MiB, and at most {max_mib:g} are allowed.")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(
        f"export: {folder}, {size:.1f} of at most {max_mib:g} MiB; 8 bits against whole weights: {likeness:.1f} dB",
        flush=True,
    )
    return folder
