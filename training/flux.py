"""Stage `diffusion` of the Flux-class model: a flow from noise to cached latents, small ones first."""

from __future__ import annotations

import torch
from diffusers import FluxPipeline
from torch import Tensor
from torch.nn.functional import avg_pool2d
from transformers import CLIPTextModel

from training.diffusion import Batches
from training.loop import Budget, Place, Training
from training.models import build_flux
from training.settings import FluxSettings


def load_text_encoder(place: Place) -> CLIPTextModel:
    """The frozen text encoder, in single precision."""
    if place.text is None:
        raise ValueError("The Flux-class model needs --text: an exported pipeline whose text encoder it reads.")
    encoder = CLIPTextModel.from_pretrained(place.text / "text_encoder", local_files_only=True)
    encoder.eval().requires_grad_(False)
    return encoder.to(place.device, torch.float32)


def pack(latents: Tensor) -> Tensor:
    """Latents as FluxPipeline gives them to the transformer, 2×2 of them a token: [images, tokens, 4 · channels]."""
    packed: Tensor = FluxPipeline._pack_latents(latents, *latents.shape)
    return packed


def positions(side: int, spacing: int, device: torch.device) -> Tensor:
    """Where the tokens of a grid lie, as FluxPipeline counts. [tokens, 3]

    A token of small latents stands for `spacing` × `spacing` tokens of whole ones, and lies in their middle.
    """
    ids: Tensor = FluxPipeline._prepare_latent_image_ids(1, side, side, device, torch.float32)
    ids[:, 1:] = spacing * ids[:, 1:] + (spacing - 1) / 2
    return ids


def noise_levels(size: int, shift: float, generator: torch.Generator) -> Tensor:
    """The noise's share, drawn as often as sampling visits it and evenly spread over the batch. [images]"""
    offset = torch.rand(size, device=generator.device, generator=generator)
    even = (torch.arange(size, device=generator.device) + offset) / size
    return shift * even / (1 + (shift - 1) * even)


def train_flux(settings: FluxSettings, place: Place, budget: Budget) -> None:
    """Train on what the stage `latents` wrote, with the text encoder of `place.text`."""
    batches = Batches.load(place)
    text_encoder = load_text_encoder(place)
    torch.manual_seed(settings.seed)
    transformer = build_flux(settings, text_encoder.config.hidden_size)
    training = Training("diffusion", transformer, settings, settings.diffusion_rate, settings.batch, place)
    if place.compile:
        transformer.compile_repeated_blocks(dynamic=False)
    text_positions = torch.zeros(batches.tokens.shape[-1], 3, device=place.device)
    side = settings.latent_size // 2
    image_positions = {spacing: positions(side // spacing, spacing, place.device) for spacing in (1, 2)}
    first_step = training.step

    def loss_at(spacing: int, size: int, generator: torch.Generator) -> Tensor:
        latents, tokens = batches.draw(size, settings.caption_dropout, generator)
        clean = pack(avg_pool2d(latents, spacing) if spacing > 1 else latents)
        # Half as many pixels each way show as much of the picture through twice the noise.
        share = noise_levels(size, settings.shift / spacing, generator)
        noise = torch.randn(clean.shape, device=place.device, generator=generator)
        with torch.no_grad():
            text = text_encoder(tokens)
        predicted = transformer(
            hidden_states=torch.lerp(clean, noise, share[:, None, None]),
            timestep=share,
            encoder_hidden_states=text.last_hidden_state,
            pooled_projections=text.pooler_output,
            txt_ids=text_positions,
            img_ids=image_positions[spacing],
            return_dict=False,
        )[0]
        loss: Tensor = (predicted.float() - (noise - clean)).square().mean()
        return loss

    def loss_of(generator: torch.Generator) -> Tensor:
        if training.step == first_step:  # both sizes, so that both are compiled before the rate begins to fall
            training.batch = settings.batch + settings.large_batch
            return (loss_at(2, settings.batch, generator) + loss_at(1, settings.large_batch, generator)) / 2
        is_small = budget.done(training.step, training.seconds, training.setup) < settings.small_share
        training.batch = settings.batch if is_small else settings.large_batch
        return loss_at(2 if is_small else 1, training.batch, generator)

    training.run(loss_of, budget)
