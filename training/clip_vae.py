"""Stage `vae` of the video model: the demo model's autoencoder learns further, on frames of rendered clips.

As it is, it makes large green areas grey and purple ones blue: it has hardly seen any.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from training.clips import draw_plan, load_subjects, render
from training.loop import Budget, Place, Training, averaged
from training.settings import WanSettings
from training.vae import COLUMNS, ROWS, plot_reconstructions, reconstruction_loss


def text_folder(place: Place) -> Path:
    """The demo model, whose text encoder the video model uses and whose autoencoder it begins with."""
    if place.text is None:
        raise ValueError("The video model needs --text: the demo model, whose text encoder and autoencoder it uses.")
    return place.text


def autoencoder_of(place: Place) -> AutoencoderKL:
    """The demo model's autoencoder, in single precision."""
    vae: AutoencoderKL = AutoencoderKL.from_pretrained(
        text_folder(place) / "vae", torch_dtype=torch.float32, local_files_only=True
    )
    return vae


def train_clip_vae(data: Path, settings: WanSettings, place: Place, budget: Budget, limit: int | None = None) -> None:
    """Train on single frames, each rendered when it is drawn."""
    subjects = load_subjects(data, settings.image_size, settings.garments, place.device, limit)
    plan = draw_plan(subjects, settings.clips, settings.seed).to(place.device)
    vae = autoencoder_of(place).to(memory_format=torch.channels_last)
    training = Training("vae", vae, settings, settings.vae_rate, settings.vae_batch, place)

    def frames(generator: torch.Generator) -> Tensor:
        some = torch.randint(len(plan), (settings.vae_batch,), device=place.device, generator=generator)
        time = torch.rand(len(some), 1, device=place.device, generator=generator)
        return render(plan.take(some), subjects.sprites, time, settings.image_size)[:, 0]

    def loss_of(generator: torch.Generator) -> Tensor:
        with torch.autocast(place.device.type, enabled=False):
            target = frames(generator).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(target).latent_dist
        noise = torch.randn(posterior.mean.shape, device=place.device, generator=generator)
        images = vae.decode(posterior.mean + posterior.std * noise).sample
        divergence = posterior.kl().mean().float()
        with torch.autocast(place.device.type, enabled=False):  # the spectrum needs single precision
            loss: Tensor = reconstruction_loss(images.float(), target) + settings.kl_weight * divergence
            return loss

    training.run(loss_of, budget)
    averaged(vae, training.checkpoint)
    shown = torch.cat([frames(training.generator) for _ in range(-(-COLUMNS * ROWS // settings.vae_batch))])
    plot_reconstructions(vae, ((shown[: COLUMNS * ROWS] + 1) * 127.5).round().byte(), place)
