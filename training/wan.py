"""Stage `diffusion` of the video model: a flow from noise to the latents of single frames, short clips, whole clips."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from diffusers import WanTransformer3DModel
from toma_diffusion_demo.loading import load_transformer
from torch import Tensor, nn
from torch.nn.functional import linear

from training.attention import norm_in_one_precision
from training.clip_latents import ClipBatches
from training.flux import load_text_encoder, noise_levels
from training.loop import Budget, Place, Training
from training.models import build_wan
from training.settings import WanSettings

TIMESTEPS = 1000
"""What WanPipeline multiplies the noise's share by."""


class PatchesAsMatrix(nn.Conv3d):
    """The same convolution as a product of matrices: its patches do not overlap. Kernels for three dimensions in half
    precision are slow in some versions of cuDNN, above all backwards."""

    def forward(self, x: Tensor) -> Tensor:
        """[clips, channels, frames, height, width], of all but the channels as many as there are patches."""
        _, rows, columns = self.kernel_size
        patches = x.unflatten(4, (-1, columns)).unflatten(3, (-1, rows))  # […, y, rows, x, columns]
        patches = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
        return linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


@dataclass(eq=False)
class ClipFlow:
    """The transformer that learns, the frozen text encoder, and what both learn from."""

    settings: WanSettings
    place: Place
    batches: ClipBatches
    transformer: WanTransformer3DModel = field(init=False)

    def __post_init__(self) -> None:
        self.text_encoder = load_text_encoder(self.place)
        torch.manual_seed(self.settings.seed)
        text_channels, latent_channels = self.text_encoder.config.hidden_size, self.batches.latents.shape[2]
        self.transformer = build_wan(self.settings, text_channels, latent_channels)
        if self.place.start:
            earlier = load_transformer(self.place.start / "transformer", torch.float32)
            self.transformer.load_state_dict(earlier.state_dict())
        norm_in_one_precision(self.transformer)
        self.transformer.patch_embedding.__class__ = PatchesAsMatrix
        if self.place.compile:
            self.transformer.compile_repeated_blocks(dynamic=False)

    def training(self) -> Training:
        """The state of the stage. Each size of parts is compiled in a step of its own."""
        settings = self.settings
        return Training(
            "diffusion",
            self.transformer,
            settings,
            settings.diffusion_rate,
            settings.batch,
            self.place,
            setup_steps=len(settings.parts),
        )

    def loss(self, part: int, generator: torch.Generator) -> Tensor:
        """The squared error of the velocity from frames to noise, of the parts with this number."""
        settings, frames = self.settings, self.settings.parts[part]
        size = max(1, settings.batch // frames)
        clean, tokens = self.batches.draw(size, frames, settings.caption_dropout, generator)
        share = noise_levels(size, settings.shifts[part], generator)
        noise = torch.randn(clean.shape, device=clean.device, generator=generator)
        with torch.no_grad():
            text = self.text_encoder(tokens).last_hidden_state
        predicted = self.transformer(
            hidden_states=torch.lerp(clean, noise, share[:, None, None, None, None]),
            timestep=TIMESTEPS * share,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        loss: Tensor = (predicted.float() - (noise - clean)).square().mean()
        return loss


def part_of(settings: WanSettings, done: float) -> int:
    """The number of the parts that are learnt when a share of the time is `done`."""
    return next(number for number, end in enumerate(settings.part_ends) if done < end or end == settings.part_ends[-1])


def train_wan(settings: WanSettings, place: Place, budget: Budget) -> None:
    """Train on what the stage `latents` wrote, with the text encoder of `place.text`."""
    flow = ClipFlow(settings, place, ClipBatches.load(place))
    training = flow.training()
    first_step = training.step

    def loss_of(generator: torch.Generator) -> Tensor:
        part = training.step - first_step
        if part >= training.setup_steps:  # before: one step of each, so that all are compiled before time counts
            part = part_of(settings, budget.done(training.step, training.seconds, training.setup))
        return flow.loss(part, generator)

    training.run(loss_of, budget)
