"""Stage `export`: the trained parts as one folder that `StableDiffusionPipeline.from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from torch import nn

from training import tokenizer as tokenizers
from training.diffusion import TextToLatents
from training.loop import HISTORY, Place, averaged
from training.models import build_scheduler
from training.settings import UNetSettings

MIB = 2**20
MAX_MIB = 40.0
CARD = Path(__file__).with_name("model_card.md")


class ModelTooLargeError(ValueError):
    """The pipeline's folder is larger than the package toma-diffusion-demo may be."""


def folder_mib(folder: Path) -> float:
    """The size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


def millions(network: nn.Module) -> str:
    """How many parameters a network has, as written in the model card."""
    return f"{sum(weight.numel() for weight in network.parameters()) / 1e6:.1f} M"


def load_pipeline(folder: Path, device: torch.device) -> StableDiffusionPipeline:
    """The pipeline as a user loads it: half precision on a GPU, single precision on a CPU."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device, torch.float16 if device.type == "cuda" else torch.float32)


def tidy(folder: Path) -> None:
    """Leave no paths of this machine in the files, and let everybody read them."""
    for path in folder.rglob("config.json"):
        values = json.loads(path.read_text())
        values.pop("_name_or_path", None)
        path.write_text(json.dumps(values, indent=2) + "\n")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes them for the owner alone


def write_files(pipeline: StableDiffusionPipeline, tokenizer: Path, folder: Path) -> None:
    """Write the pipeline so that it loads without arguments, in old and new versions of transformers."""
    pipeline.save_pretrained(folder, safe_serialization=True)
    # transformers 5 would take the text encoder's precision from the file where diffusers widens its own networks,
    # and the pipeline fails when they differ.
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float32"}, indent=2) + "\n")
    # All versions read vocab.json and merges.txt; tokenizer.json holds the same again.
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(tokenizer, folder / "tokenizer")
    tidy(folder)


def assemble(settings: UNetSettings, place: Place) -> tuple[StableDiffusionPipeline, dict[str, Any]]:
    """The pipeline from the stages' results, in half precision, and the checkpoint of the diffusion stage."""
    tokenizer = tokenizers.load(place.work / "tokenizer")
    model = TextToLatents(settings, tokenizer)
    state = averaged(model, place.work / "diffusion.pt")
    vae = AutoencoderKL.from_pretrained(place.work / "vae", local_files_only=True)
    pipeline = StableDiffusionPipeline(
        vae=vae.half(),
        text_encoder=model.text_encoder.half(),
        tokenizer=tokenizer,
        unet=model.unet.half(),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return pipeline, state


def chapter(stage: str, emoji_share: float, state: dict[str, Any], place: Place) -> dict[str, Any]:
    """What one stage did, for the history."""
    latents = torch.load(place.work / "latents.pt", map_location="cpu", weights_only=True, mmap=True)
    return {
        "stage": stage,
        "seconds": round(state["seconds"], 1),
        "steps": state["step"],
        "images": state["images"],
        "different_images": len(latents["mirror"]),
        "emoji_share": emoji_share,
        "device": torch.cuda.get_device_name() if place.device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "settings": state["settings"],
    }


def history_of(stage: str, state: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """What the networks went through: if they came from an exported model, its own history first."""
    if (place.work / HISTORY).exists():
        earlier = json.loads((place.work / HISTORY).read_text())
    else:
        vae_state = torch.load(place.work / "vae.pt", map_location="cpu", weights_only=True, mmap=True)
        earlier = [chapter("autoencoder", 0.5, vae_state, place)]
    return [*earlier, chapter(stage, state["settings"]["emoji_share"], state, place)]


def table_line(each: dict[str, Any]) -> str:
    """One line of the model card's table."""
    cells = (
        each["stage"],
        f"{each['seconds'] / 60:.1f}",
        f"{each['steps']:,}",
        f"{each['images']:,} of {each['different_images']:,}",
        f"{each['emoji_share']:.0%}",
        f"{each['device']}, torch {each['torch']}",
    )
    return f"| {' | '.join(cells)} |"


def model_card(pipeline: StableDiffusionPipeline, history: list[dict[str, Any]]) -> str:
    """The model card with its figures filled in."""
    return Template(CARD.read_text()).substitute(
        unet=millions(pipeline.unet),
        vae=millions(pipeline.vae),
        text_encoder=millions(pipeline.text_encoder),
        image_size=pipeline.vae.config.sample_size,
        latent_channels=pipeline.vae.config.latent_channels,
        vocabulary=len(pipeline.tokenizer),
        images=f"{max(each['different_images'] for each in history):,}",
        history="\n".join(table_line(each) for each in history),
    )


def export(settings: UNetSettings, place: Place, max_mib: float = MAX_MIB) -> Path:
    """Write the folder `pipeline`, unless it is too large, or does not load and generate an image.

    Raises:
        ModelTooLargeError: The folder would be larger than `max_mib`.
    """
    pipeline, state = assemble(settings, place)
    folder = place.work / "pipeline"
    unfinished = place.work / "pipeline.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_files(pipeline, place.work / "tokenizer", unfinished)
    history = history_of("UNet and text encoder", state, place)
    (unfinished / HISTORY).write_text(json.dumps(history, indent=2) + "\n")
    (unfinished / "README.md").write_text(model_card(pipeline, history))

    size = folder_mib(unfinished)
    if size > max_mib:
        raise ModelTooLargeError(f"{unfinished} has {size:.1f} MiB, and at most {max_mib:g} are allowed.")
    load_pipeline(unfinished, place.device)("3d emoji of a red apple", num_inference_steps=2)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    print(f"export: {folder}, {size:.1f} of at most {max_mib:g} MiB", flush=True)
    return folder
