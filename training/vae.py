"""Stage `vae`: the autoencoder learns to give the images back."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, l1_loss, mse_loss, pad

from training.data import load, to_float
from training.loop import Budget, Place, Training, averaged, write_atomically
from training.models import build_vae
from training.settings import LatentSettings

SCALES = 3
"""Sharp edges weigh at full size, shapes and shading at a half and a quarter of it."""
COLOUR_WEIGHT = 2.0
"""Of the two colour channels, relative to brightness."""
SQUARES_WEIGHT = 5.0
"""Of squared errors at the smallest scale. L1 alone is content with grey where colours are few: after 500 small steps
on a CPU, reconstructions were grey with equal weights and L1, and had oranges, blues and some reds with these two."""
COLUMNS, ROWS = 8, 4
"""Of the images in `reconstructions.png`."""


def opponent(images: Tensor) -> Tensor:
    """Red, green and blue as brightness, orange against blue, and green against purple; the two colours count more.

    Most of an image's error is brightness, most of the rest orange against blue. Left to itself a young autoencoder
    draws everything grey, later greens blue and pinks orange.
    """
    red, green, blue = images.unbind(dim=1)
    brightness = (red + 2 * green + blue) / 4
    orange = (red - blue) / 2
    lime = (2 * green - red - blue) / 4
    return torch.stack([brightness, COLOUR_WEIGHT * orange, COLOUR_WEIGHT * lime], dim=1)


def gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbours, across and down."""
    return images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]


def spectrum(images: Tensor) -> Tensor:
    """How much there is of every frequency, wherever it lies: texture counts even where its exact place is lost."""
    return torch.log1p(torch.fft.rfft2(images, norm="ortho").abs())


def reconstruction_loss(images: Tensor, target: Tensor) -> Tensor:
    """L1 of pixels and of gradients at several scales, and of the spectrum; squares at the smallest scale.

    A loss on pixels alone is content with a blur. What usually mends that compares features of a network trained on a
    million photographs; we have none, and use the gradients and frequencies such features are made of.
    """
    images, target = opponent(images), opponent(target)
    loss = 0.1 * l1_loss(spectrum(images), spectrum(target))
    for scale in range(SCALES):
        loss = loss + l1_loss(images, target)
        for ours, theirs in zip(gradients(images), gradients(target), strict=True):
            loss = loss + l1_loss(ours, theirs)
        if scale < SCALES - 1:
            images, target = avg_pool2d(images, 2), avg_pool2d(target, 2)
    return loss + SQUARES_WEIGHT * mse_loss(images, target)


def train_vae(data: Path, settings: LatentSettings, place: Place, budget: Budget, limit: int | None = None) -> None:
    """Train the autoencoder on whole images, half of them mirrored."""
    dataset = load(data, settings.image_size, limit)
    torch.manual_seed(settings.seed)
    vae = build_vae(settings).to(memory_format=torch.channels_last)
    training = Training("vae", vae, settings, settings.vae_rate, settings.vae_batch, place)
    pixels = dataset.pixels(place.device)
    weights = dataset.weights().to(place.device)

    def forward(target: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        posterior = vae.encode(target).latent_dist
        latents = posterior.mean + posterior.std * noise
        small = vae.decode(avg_pool2d(latents, 2)).sample if settings.pooled_weight else None
        return vae.decode(latents).sample, posterior.kl().mean(), small

    forward = torch.compile(forward, dynamic=False) if place.compile and settings.vae_compiled else forward

    def loss_of(generator: torch.Generator) -> Tensor:
        index = torch.multinomial(weights, settings.vae_batch, replacement=True, generator=generator)
        target = to_float(pixels[index])
        mirrored = torch.rand(len(index), device=place.device, generator=generator) < 0.5
        target = torch.where(mirrored[:, None, None, None], target.flip(-1), target)
        target = target.contiguous(memory_format=torch.channels_last)
        shape = (len(index), settings.latent_channels, settings.latent_size, settings.latent_size)
        noise = torch.randn(shape, device=place.device, generator=generator)
        images, divergence, small = forward(target, noise)
        with torch.autocast(place.device.type, enabled=False):  # the spectrum needs single precision
            loss = reconstruction_loss(images.float(), target) + settings.kl_weight * divergence.float()
            if small is not None:
                loss = loss + settings.pooled_weight * reconstruction_loss(small.float(), avg_pool2d(target, 2))
            return loss

    training.run(loss_of, budget)
    averaged(vae, training.checkpoint)
    plot_reconstructions(vae, pixels[:: max(1, len(pixels) // (COLUMNS * ROWS))][: COLUMNS * ROWS], place)


@torch.no_grad()
def plot_reconstructions(vae: AutoencoderKL, pixels: Tensor, place: Place) -> None:
    """Write `reconstructions.png`: some of the images in rows, and under each row what the autoencoder makes of it.

    The denoiser cannot be better than these: look at them before training it.
    """
    target = to_float(pixels)
    images = torch.cat([vae.decode(vae.encode(each).latent_dist.mean).sample for each in target.split(COLUMNS)])
    error = (images.clamp(-1, 1) - target).square().mean(dim=(1, 2, 3))
    decibels = (10 * torch.log10(4 / error.clamp(min=1e-12))).mean().item()
    pairs = [
        torch.cat(list(row), dim=-1)
        for both in zip(target.split(COLUMNS), images.split(COLUMNS), strict=True)
        for row in both
    ]
    width = max(row.shape[-1] for row in pairs)
    sheet = torch.cat([pad(row, (0, width - row.shape[-1]), value=1.0) for row in pairs], dim=-2)
    sheet = ((sheet.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).cpu()
    path = place.work / "reconstructions.png"
    write_atomically(path, lambda unfinished: Image.fromarray(sheet.numpy()).save(unfinished, format="PNG"))
    print(f"vae: {path}, {decibels:.1f} dB", flush=True)
