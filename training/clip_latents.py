"""Stage `latents` of the video model: clips are rendered and encoded, frame by frame, with the demo model's autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from toma_diffusion_demo.loading import FrameAutoencoder
from torch import Tensor

from training import tokenizer as tokenizers
from training.clips import Plan, draw_plan, load_subjects, render
from training.latents import tokenise
from training.loop import Place, write_atomically
from training.progress import Progress
from training.settings import WanSettings

FRAMES_AT_ONCE = 256
SHOWN = 8
"""Clips whose reconstruction is kept to look at."""


def text_folder(place: Place) -> Path:
    """The pipeline whose text encoder and autoencoder the video model uses as they are."""
    if place.text is None:
        raise ValueError("The video model needs --text: an exported pipeline whose text encoder and autoencoder it uses.")
    return place.text


def load_autoencoder(place: Place) -> FrameAutoencoder:
    """The frozen autoencoder, in half precision where that is fast."""
    dtype = torch.float16 if place.device.type == "cuda" else torch.float32
    vae = AutoencoderKL.from_pretrained(text_folder(place) / "vae", torch_dtype=dtype, local_files_only=True)
    vae.to(place.device, memory_format=torch.channels_last).requires_grad_(False)
    return FrameAutoencoder(vae).eval()


def strip(frames: Tensor) -> Image.Image:
    """Frames from -1 to 1 beside each other. [frames, 3, height, width]"""
    pixels = ((frames.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu().permute(2, 0, 3, 1)  # [height, frames, …]
    return Image.fromarray(pixels.flatten(1, 2).numpy())


@torch.no_grad()
def encode(plan: Plan, sprites: Tensor, vae: FrameAutoencoder, settings: WanSettings) -> Tensor:
    """The latents of all clips, in half precision on the CPU. [clips, frames, channels, height, width]"""
    device, at_once = sprites.device, max(1, FRAMES_AT_ONCE // settings.frames)
    latents: list[Tensor] = []
    with Progress("latents") as progress:
        for start in range(0, len(plan), at_once):
            clips = render(plan.part(start, start + at_once, device), sprites, settings.frames, settings.image_size)
            frames = clips.flatten(0, 1).to(vae.dtype, memory_format=torch.channels_last)
            latents.append(vae.encode(frames).half().unflatten(0, clips.shape[:2]).cpu())
            progress.update((start + len(clips)) / len(plan), f"{start + len(clips)} clips")
    return torch.cat(latents)


@torch.no_grad()
def write_reconstructions(plan: Plan, sprites: Tensor, vae: FrameAutoencoder, settings: WanSettings, path: Path) -> None:
    """Four frames of some clips, as they were rendered and, below, as the autoencoder decodes them."""
    clips = render(plan.part(0, SHOWN, sprites.device), sprites, settings.frames, settings.image_size)
    rows = []
    for clip in clips[:, :: max(1, settings.frames // 4)]:
        (decoded,) = vae.decode(vae.encode(clip.to(vae.dtype)).transpose(0, 1)[None])
        rows += [strip(clip), strip(decoded[0].transpose(0, 1))]
    sheet = np.concatenate([np.asarray(row) for row in rows])
    write_atomically(path, lambda unfinished: Image.fromarray(sheet).save(unfinished, format="PNG"))


def prepare_clips(data: Path, settings: WanSettings, place: Place, limit: int | None = None) -> None:
    """Write `latents.pt` and `reconstructions.png`, unless the first is there."""
    path = place.work / "latents.pt"
    if path.exists():
        print(f"latents: {path} is there already", flush=True)
        return
    tokenizer = tokenizers.load(text_folder(place) / "tokenizer")
    vae = load_autoencoder(place)
    subjects = load_subjects(data, settings.image_size, settings.garments, place.device, limit)
    plan = draw_plan(subjects, settings.clips, settings.seed)
    write_reconstructions(plan, subjects.sprites, vae, settings, place.work / "reconstructions.png")
    state = {
        "latents": encode(plan, subjects.sprites, vae, settings),
        "tokens": tokenise(tokenizer, plan.captions).to(torch.int16),
        "no_caption": tokenise(tokenizer, [""])[0].to(torch.int16),
    }
    write_atomically(path, lambda unfinished: torch.save(state, unfinished))


@dataclass(frozen=True)
class ClipBatches:
    """Latents and captions on the device, 1.6 GB of them. Batches are drawn there."""

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
