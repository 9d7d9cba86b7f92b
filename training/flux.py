"""Stage `diffusion` of the Flux-class model: a flow from noise to cached latents, small ones first."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from toma_diffusion_demo.loading import load_transformer
from torch import Tensor
from torch.nn.functional import avg_pool2d
from transformers import CLIPTextModel

from training.attention import norm_in_one_precision
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


@dataclass(eq=False)
class Flow:
    """The transformer that learns, the frozen text encoder, and what both learn from."""

    settings: FluxSettings
    place: Place
    batches: Batches
    transformer: FluxTransformer2DModel = field(init=False)

    def __post_init__(self) -> None:
        device = self.place.device
        self.text_encoder = load_text_encoder(self.place)
        torch.manual_seed(self.settings.seed)
        self.transformer = build_flux(self.settings, self.text_encoder.config.hidden_size)
        if self.place.start:
            earlier = load_transformer(self.place.start / "transformer", torch.float32)
            self.transformer.load_state_dict(earlier.state_dict())
        norm_in_one_precision(self.transformer)
        if self.place.compile:
            self.transformer.compile_repeated_blocks(dynamic=False)
        self.text_positions = torch.zeros(self.batches.tokens.shape[-1], 3, device=device)
        side = self.settings.latent_size // 2
        self.image_positions = {spacing: positions(side // spacing, spacing, device) for spacing in (1, 2)}

    def training(self) -> Training:
        """The state of the stage. Each size is compiled in a step of its own."""
        settings = self.settings
        return Training(
            "diffusion", self.transformer, settings, settings.diffusion_rate, settings.batch, self.place, setup_steps=2
        )

    def batch(self, spacing: int) -> int:
        """Images a step, of whole latents (1) or of those of half the size (2)."""
        return self.settings.large_batch if spacing == 1 else self.settings.batch

    def loss(self, spacing: int, generator: torch.Generator) -> Tensor:
        """The squared error of the velocity from image to noise."""
        size = self.batch(spacing)
        latents, tokens = self.batches.draw(size, self.settings.caption_dropout, generator)
        clean = pack(avg_pool2d(latents, spacing) if spacing > 1 else latents)
        # Half as many pixels each way show as much of the picture through twice the noise.
        share = noise_levels(size, self.settings.shift / spacing, generator)
        noise = torch.randn(clean.shape, device=clean.device, generator=generator)
        with torch.no_grad():
            text = self.text_encoder(tokens)
        predicted = self.transformer(
            hidden_states=torch.lerp(clean, noise, share[:, None, None]),
            timestep=share,
            encoder_hidden_states=text.last_hidden_state,
            pooled_projections=text.pooler_output,
            txt_ids=self.text_positions,
            img_ids=self.image_positions[spacing],
            return_dict=False,
        )[0]
        loss: Tensor = (predicted.float() - (noise - clean)).square().mean()
        return loss


def train_flux(settings: FluxSettings, place: Place, budget: Budget) -> None:
    """Train on what the stage `latents` wrote, with the text encoder of `place.text`."""
    flow = Flow(settings, place, Batches.load(place))
    training = flow.training()
    first_step = training.step

    def loss_of(generator: torch.Generator) -> Tensor:
        if training.step < first_step + training.setup_steps:  # one of each size: both are compiled before time counts
            spacing = 1 + training.step - first_step
        else:
            done = budget.done(training.step, training.seconds, training.setup)
            spacing = 2 if done < settings.small_share else 1
        training.batch = flow.batch(spacing)
        return flow.loss(spacing, generator)

    training.run(loss_of, budget)
