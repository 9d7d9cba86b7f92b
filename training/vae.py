"""Stage `vae`: the autoencoder learns to give the images back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, l1_loss

from training.data import load, to_float
from training.loop import Budget, Place, Training
from training.models import build_vae
from training.settings import Settings

SCALES = 3
"""Sharp edges weigh at full size, shapes and shading at a half and a quarter of it."""


def gradients(images: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbours, across and down."""
    return images[..., 1:] - images[..., :-1], images[..., 1:, :] - images[..., :-1, :]


def spectrum(images: Tensor) -> Tensor:
    """How much there is of every frequency, wherever it lies: texture counts even where its exact place is lost."""
    return torch.log1p(torch.fft.rfft2(images, norm="ortho").abs())


def reconstruction_loss(images: Tensor, target: Tensor) -> Tensor:
    """L1 of pixels and of gradients at several scales, and of the spectrum.

    A loss on pixels alone is content with a blur. What usually mends that compares features of a network trained on a
    million photographs; we have none, and use the gradients and frequencies such features are made of.
    """
    loss = 0.1 * l1_loss(spectrum(images), spectrum(target))
    for scale in range(SCALES):
        loss = loss + l1_loss(images, target)
        for ours, theirs in zip(gradients(images), gradients(target), strict=True):
            loss = loss + l1_loss(ours, theirs)
        if scale < SCALES - 1:
            images, target = avg_pool2d(images, 2), avg_pool2d(target, 2)
    return loss


def train_vae(data: Path, settings: Settings, place: Place, budget: Budget, limit: int | None = None) -> None:
    """Train the autoencoder on whole images, half of them mirrored."""
    dataset = load(data, settings.image_size, limit)
    torch.manual_seed(settings.seed)
    vae = build_vae(settings).to(memory_format=torch.channels_last)
    training = Training("vae", vae, settings, settings.vae_rate, settings.vae_batch, place)
    pixels = dataset.pixels(place.device)
    weights = dataset.weights.to(place.device)

    def forward(target: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(target).latent_dist
        latents = posterior.mean + posterior.std * noise
        return vae.decode(latents).sample, posterior.kl().mean()

    def loss_of(generator: torch.Generator) -> Tensor:
        index = torch.multinomial(weights, settings.vae_batch, replacement=True, generator=generator)
        target = to_float(pixels[index])
        mirrored = torch.rand(len(index), device=place.device, generator=generator) < 0.5
        target = torch.where(mirrored[:, None, None, None], target.flip(-1), target)
        target = target.contiguous(memory_format=torch.channels_last)
        shape = (len(index), settings.latent_channels, settings.latent_size, settings.latent_size)
        noise = torch.randn(shape, device=place.device, generator=generator)
        images, divergence = forward(target, noise)
        with torch.autocast(place.device.type, enabled=False):  # the spectrum needs single precision
            return reconstruction_loss(images.float(), target) + settings.kl_weight * divergence.float()

    training.run(loss_of, budget)
