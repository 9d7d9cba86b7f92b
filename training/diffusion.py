"""Stage `diffusion`: denoiser and text encoder learn together, from cached latents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from training import tokenizer as tokenizers
from training.loop import Budget, Place, Training
from training.models import build_scheduler, build_text_encoder, build_unet
from training.settings import UNetSettings

MAX_WEIGHT = 5.0


class TextToLatents(nn.Module):
    """The two networks that are trained together, so that one optimizer and one checkpoint hold both."""

    def __init__(self, settings: UNetSettings, tokenizer: CLIPTokenizer) -> None:
        super().__init__()
        self.unet = build_unet(settings).to(memory_format=torch.channels_last)
        self.text_encoder = build_text_encoder(settings, tokenizer)

    def continue_from(self, folder: Path) -> None:
        """Take over the weights of an exported pipeline, of the same sizes."""
        unet = UNet2DConditionModel.from_pretrained(folder / "unet", local_files_only=True)
        text_encoder = CLIPTextModel.from_pretrained(folder / "text_encoder", local_files_only=True)
        self.unet.load_state_dict(unet.state_dict())
        self.text_encoder.load_state_dict(text_encoder.state_dict())


@dataclass(frozen=True)
class Batches:
    """Latents and captions on the device. Batches are drawn there: 135 MB to 1.2 GB, and no loader to wait for."""

    latents: Tensor  # [images, 2, channels, height, width]
    tokens: Tensor  # [images, variants, tokens]
    no_caption: Tensor  # [tokens]
    weights: Tensor  # [images]
    mirror: Tensor  # [images]

    @classmethod
    def load(cls, place: Place) -> Batches:
        """Read what the stage `latents` wrote."""
        path = place.work / "latents.pt"
        if not path.exists():
            raise FileNotFoundError(f"There is no {path}: run the stage latents first.")
        state = torch.load(path, map_location=place.device, weights_only=True)
        state["tokens"], state["no_caption"] = state["tokens"].long(), state["no_caption"].long()
        return cls(**state)

    def draw(self, size: int, caption_dropout: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Latents and token ids of `size` images: mirrored or not, one of the wordings or none."""
        index = torch.multinomial(self.weights, size, replacement=True, generator=generator)
        chance = torch.rand(3, size, device=index.device, generator=generator)
        side = ((chance[0] < 0.5) & self.mirror[index]).long()
        wording = (chance[1] * self.tokens.shape[1]).long()
        dropped = chance[2] < caption_dropout
        tokens = torch.where(dropped[:, None], self.no_caption, self.tokens[index, wording])
        return self.latents[index, side].float(), tokens


def spread_timesteps(size: int, steps: int, generator: torch.Generator) -> Tensor:
    """Random timesteps, evenly spread over the batch: every batch sees all noise levels, and losses vary less."""
    offset = torch.rand((), device=generator.device, generator=generator)
    even = (torch.arange(size, device=generator.device) + offset) / size
    return (even * steps).long().clamp(max=steps - 1)


def loss_weight(signal: Tensor) -> Tensor:
    """The weight of the velocity's error where the share `signal` of the variance is image.

    Counted as an error of the image, velocity weighs as 1 + SNR, without bound where there is hardly any noise. That is
    cut at 5, as min-SNR does; unlike it, pure noise keeps its weight of 1, since from there sampling begins.
    """
    return (MAX_WEIGHT * (1 - signal)).clamp(max=1.0)


def train_diffusion(settings: UNetSettings, place: Place, budget: Budget) -> None:
    """Train on what the stage `latents` wrote."""
    batches = Batches.load(place)
    torch.manual_seed(settings.seed)
    model = TextToLatents(settings, tokenizers.load(place.work / "tokenizer"))
    if place.start:
        model.continue_from(place.start)
    training = Training("diffusion", model, settings, settings.diffusion_rate, settings.batch, place)
    signal = build_scheduler().alphas_cumprod.to(place.device)  # [timesteps]
    unet = torch.compile(model.unet) if place.compile else model.unet

    def loss_of(generator: torch.Generator) -> Tensor:
        latents, tokens = batches.draw(settings.batch, settings.caption_dropout, generator)
        timesteps = spread_timesteps(len(latents), len(signal), generator)
        noise = torch.randn(latents.shape, device=place.device, generator=generator)
        share = signal[timesteps][:, None, None, None]
        noisy = share.sqrt() * latents + (1 - share).sqrt() * noise
        velocity = share.sqrt() * noise - (1 - share).sqrt() * latents
        context = model.text_encoder(tokens).last_hidden_state
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        predicted = unet(noisy, timesteps, context, return_dict=False)[0]
        errors = (predicted.float() - velocity).square().mean(dim=(1, 2, 3))
        loss: Tensor = (loss_weight(signal[timesteps]) * errors).mean()
        return loss

    training.run(loss_of, budget)
