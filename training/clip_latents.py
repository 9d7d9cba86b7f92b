"""Stage `latents` of the video model: clips are rendered and encoded, frame by frame, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training import tokenizer as tokenizers
from training.clip_vae import autoencoder_of, text_folder
from training.clips import Plan, captions_of, draw_plan, load_subjects, render, whole_clip
from training.latents import normalise, tokenise
from training.loop import Place, averaged, write_atomically
from training.progress import Progress
from training.settings import WanSettings

FRAMES_AT_ONCE = 256
MEASURED = 512
"""Clips by which the latents' means and deviations are measured."""


@torch.no_grad()
def encode(plan: Plan, sprites: Tensor, vae: AutoencoderKL, settings: WanSettings) -> Tensor:
    """The latents of all clips, in half precision. [clips, frames, channels, height, width]"""
    at_once = max(1, FRAMES_AT_ONCE // settings.frames)
    time = whole_clip(settings.frames, sprites.device)
    latents: list[Tensor] = []
    with Progress("latents") as progress:
        for start in range(0, len(plan), at_once):
            clips = render(plan.take(slice(start, start + at_once)), sprites, time, settings.image_size)
            frames = clips.flatten(0, 1).to(vae.dtype, memory_format=torch.channels_last)
            encoded = vae.encode(frames).latent_dist.mean
            latents.append(encoded.half().unflatten(0, clips.shape[:2]))
            progress.update((start + len(clips)) / len(plan), f"{start + len(clips)} clips")
    return torch.cat(latents)


def finished_vae(plan: Plan, sprites: Tensor, settings: WanSettings, place: Place) -> AutoencoderKL:
    """The trained autoencoder with latents of mean 0 and deviation 1, or that of an exported model, which has them."""
    if place.start:
        vae: AutoencoderKL = AutoencoderKL.from_pretrained(place.start / "vae", local_files_only=True)
        return vae.to(place.device)
    vae = autoencoder_of(place)
    averaged(vae, place.work / "vae.pt")
    vae.to(place.device)
    normalise(vae, encode(plan.take(slice(0, MEASURED)), sprites, vae, settings))
    return vae


def prepare_clips(data: Path, settings: WanSettings, place: Place, limit: int | None = None) -> None:
    """Write `latents.pt` and the folder `vae`, unless they are there and newer than the autoencoder."""
    path, trained = place.work / "latents.pt", place.start or place.work / "vae.pt"
    if path.exists() and path.stat().st_mtime_ns > trained.stat().st_mtime_ns:
        print(f"latents: {path} is there already", flush=True)
        return
    tokenizer = tokenizers.load(text_folder(place) / "tokenizer")
    subjects = load_subjects(data, settings.image_size, settings.garments, place.device, limit)
    plan = draw_plan(subjects, settings.clips, settings.seed)
    captions = tokenise(tokenizer, captions_of(plan, subjects))
    plan = plan.to(place.device)
    vae = finished_vae(plan, subjects.sprites, settings, place)
    vae.save_pretrained(place.work / "vae")
    if place.device.type == "cuda":
        vae.half()
    state = {
        "latents": encode(plan, subjects.sprites, vae.to(memory_format=torch.channels_last), settings),
        "tokens": captions.to(torch.int16),
        "no_caption": tokenise(tokenizer, [""])[0].to(torch.int16),
    }
    write_atomically(path, lambda unfinished: torch.save(state, unfinished))


@dataclass(frozen=True)
class ClipBatches:
    """Latents and captions on the device, 1.1 GB of them. Batches are drawn there."""

    latents: Tensor  # [clips, frames, channels, height, width]
    tokens: Tensor  # [clips, tokens]
    no_caption: Tensor  # [tokens]

    @classmethod
    def load(cls, place: Place) -> ClipBatches:
        """Read what the stage `latents` wrote."""
        path = place.work / "latents.pt"
        if not path.exists():
            raise FileNotFoundError(f"There is no {path}: run the stage latents first.")
        state = torch.load(path, map_location=place.device, weights_only=True)
        return cls(state["latents"], state["tokens"].long(), state["no_caption"].long())

    def draw(self, size: int, frames: int, dropout: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """So many consecutive frames of `size` clips, [clips, channels, frames, height, width], and the token ids of
        their captions or of none."""
        device, (count, length) = generator.device, self.latents.shape[:2]
        clip = torch.randint(count, (size,), device=device, generator=generator)
        first = torch.randint(length - frames + 1, (size, 1), device=device, generator=generator)
        dropped = torch.rand(size, 1, device=device, generator=generator) < dropout
        latents = self.latents[clip[:, None], first + torch.arange(frames, device=device)]
        return latents.float().transpose(1, 2), torch.where(dropped, self.no_caption, self.tokens[clip])
