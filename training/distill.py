"""Stage `distill`: low-rank changes let the demo model draw in four steps without guidance as it does in twenty with.

No image is needed, only captions: the model itself, guided and with many steps, is the teacher. The way from noise to
image is cut into as many parts as the student has steps, and in one step the student learns to go as far as the
teacher goes in that part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from toma_diffusion_demo.loading import DOWN, UP
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import CLIPTextModel

from training import tokenizer as tokenizers
from training.data import load
from training.latents import tokenise, wordings
from training.loop import Budget, Place, Training
from training.models import build_scheduler
from training.settings import FourStepSettings

CAPTION_IMAGE_SIZE = 64
"""Captions name the colour of a photograph; that much of it is enough to see it."""


class LowRank(nn.Module):
    """A change of low rank to the weights of a layer. At first it changes nothing."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, *inputs = weight.shape
        self.down = nn.Parameter(torch.empty(rank, *inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # as torch starts its own layers

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weights."""
        return weight + (self.up @ self.down.flatten(1)).view_as(weight)


def load_unet(place: Place) -> UNet2DConditionModel:
    """The UNet to distill, in single precision and frozen."""
    if place.text is None:
        raise ValueError("The four-step model needs --text: the exported pipeline to distill.")
    unet = UNet2DConditionModel.from_pretrained(place.text / "unet", local_files_only=True)
    return unet.requires_grad_(False).to(memory_format=torch.channels_last)


def build_student(settings: FourStepSettings, place: Place) -> UNet2DConditionModel:
    """The same UNet with a low-rank change to every linear and convolutional layer, which is all that is trained."""
    unet = load_unet(place)
    for layer in [module for module in unet.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]:
        register_parametrization(layer, "weight", LowRank(layer.weight, settings.rank))
    return unet


def low_rank_weights(student: UNet2DConditionModel) -> dict[str, Tensor]:
    """The changes, named as `load_lora_weights` of diffusers reads them, in half precision."""
    weights = {}
    for name, module in student.named_modules():
        if isinstance(module, LowRank):
            layer = "unet." + name.removesuffix(".parametrizations.weight.0")
            up = module.up.detach()
            weights[layer + DOWN] = module.down.detach()
            weights[layer + UP] = up[:, :, None, None] if module.down.ndim == 4 else up
    return {name: weight.cpu().half().contiguous() for name, weight in weights.items()}


@dataclass(frozen=True)
class Schedule:
    """Velocity and DDIM steps at the noise levels of the demo model's scheduler."""

    signal: Tensor  # [timesteps], the image's share of the variance

    def timesteps(self, steps: int) -> list[int]:
        """Where steps begin, the last one's end included: -1 is the finished image."""
        return [len(self.signal) - 1 - index * len(self.signal) // steps for index in range(steps + 1)]

    def angle(self, timesteps: Tensor) -> Tensor:
        """Image and noise are two axes; the angle turns from 0, all image, to 90 degrees, all noise. [n, 1, 1, 1]"""
        share = torch.where(timesteps < 0, torch.ones_like(self.signal[:1]), self.signal[timesteps.clamp(min=0)])
        return torch.acos(share.sqrt().clamp(0, 1))[:, None, None, None]

    def step(self, noisy: Tensor, velocity: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """A DDIM step from the timesteps `start` to `end`: a turn by the angle between them."""
        turn = self.angle(start) - self.angle(end)
        return turn.cos() * noisy - turn.sin() * velocity

    def velocity(self, noisy: Tensor, reached: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The velocity with which one step goes from `noisy` to `reached`."""
        turn = self.angle(start) - self.angle(end)
        return (turn.cos() * noisy - reached) / turn.sin()


@dataclass(frozen=True)
class Captions:
    """Wordings of captions, and what the frozen text encoder makes of them."""

    tokens: Tensor  # [images, variants, tokens]
    weights: Tensor  # [images]
    encoder: CLIPTextModel
    nothing: Tensor  # [1, tokens, channels]: no caption

    @classmethod
    def load(cls, data: Path, settings: FourStepSettings, place: Place, limit: int | None) -> Captions:
        """Read the captions of the data, worded as in the training of the demo model."""
        assert place.text is not None
        tokenizer = tokenizers.load(place.text / "tokenizer")
        encoder = CLIPTextModel.from_pretrained(place.text / "text_encoder", local_files_only=True)
        encoder = encoder.eval().requires_grad_(False).to(place.device, torch.float32)
        dataset = load(data, CAPTION_IMAGE_SIZE, limit)
        texts = [text for image in wordings(dataset, settings) for text in image]
        tokens = tokenise(tokenizer, texts).view(len(dataset), settings.caption_variants, -1).to(place.device)
        weights = dataset.weights(settings.emoji_share, settings.concept_power).to(place.device)
        nothing = encoder(tokenise(tokenizer, [""]).to(place.device)).last_hidden_state
        return cls(tokens, weights, encoder, nothing)

    @torch.no_grad()
    def draw(self, size: int, generator: torch.Generator) -> Tensor:
        """So many captions, encoded. [size, tokens, channels]"""
        index = torch.multinomial(self.weights, size, replacement=True, generator=generator)
        chance = torch.rand(size, device=index.device, generator=generator)
        text: Tensor = self.encoder(self.tokens[index, (chance * self.tokens.shape[1]).long()]).last_hidden_state
        return text


@dataclass(frozen=True)
class Lesson:
    """What the teacher did with one batch of captions: one row for each picture and part of the way."""

    noisy: Tensor
    velocity: Tensor  # of the one step that replaces the teacher's
    start: Tensor  # timesteps
    text: Tensor


@dataclass(frozen=True)
class Teacher:
    """The model as it is, with guidance and many steps."""

    unet: UNet2DConditionModel
    schedule: Schedule
    captions: Captions
    settings: FourStepSettings

    def predict(self, noisy: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """The guided velocity."""
        both = torch.cat([self.captions.nothing.expand_as(text), text]).to(self.unet.dtype)
        twice = noisy.repeat(2, 1, 1, 1).to(self.unet.dtype, memory_format=torch.channels_last)
        without, given = self.unet(twice, timesteps.repeat(2), both, return_dict=False)[0].float().chunk(2)
        guided: Tensor = without + self.settings.guidance * (given - without)
        return guided

    @torch.no_grad()
    def teach(self, student: UNet2DConditionModel, place: Place, generator: torch.Generator) -> Lesson:
        """Draw a batch of pictures. Some go on from where the student's step led, the others from the teacher's."""
        settings, schedule = self.settings, self.schedule
        text = self.captions.draw(settings.trajectories, generator)
        size, device = len(text), text.device
        side, channels = self.unet.config.sample_size, self.unet.config.in_channels
        noisy = torch.randn(size, channels, side, side, device=device, generator=generator)
        own = torch.rand(size, device=device, generator=generator) < settings.own_share
        every = torch.tensor(schedule.timesteps(settings.teacher_steps), device=device)[:, None].expand(-1, size)
        stride = settings.teacher_steps // settings.steps
        lessons = []
        for begin in range(0, settings.teacher_steps, stride):
            reached = noisy
            for start, end in zip(every[begin : begin + stride], every[begin + 1 : begin + stride + 1], strict=True):
                reached = schedule.step(reached, self.predict(reached, start, text), start, end)
            start, end = every[begin], every[begin + stride]
            lessons.append(Lesson(noisy, schedule.velocity(noisy, reached, start, end), start, text))
            with place.autocast(cache=False):
                velocity = student(noisy, start, text, return_dict=False)[0].float()
            by_student = schedule.step(noisy, velocity, start, end)
            noisy = torch.where(own[:, None, None, None], by_student, reached)
        return join(lessons)


def join(lessons: list[Lesson]) -> Lesson:
    """All rows in one."""
    return Lesson(
        *(torch.cat([getattr(each, name) for each in lessons]) for name in ("noisy", "velocity", "start", "text"))
    )


def train_four_step(
    data: Path, settings: FourStepSettings, place: Place, budget: Budget, limit: int | None = None
) -> None:
    """Distill the pipeline `place.text`. The teacher draws while the student learns; the newest pictures are kept."""
    torch.manual_seed(settings.seed)
    training = Training("distill", build_student(settings, place), settings, settings.rate, settings.batch, place)
    student = training.model
    half = torch.float16 if place.device.type == "cuda" else torch.float32
    teacher = Teacher(
        load_unet(place).to(place.device, half),
        Schedule(build_scheduler().alphas_cumprod.to(place.device)),
        Captions.load(data, settings, place, limit),
        settings,
    )
    lessons: list[Lesson] = []
    joined: list[Lesson] = []

    def loss_of(generator: torch.Generator) -> Tensor:
        if not lessons or training.step % settings.steps_between == 0:
            with torch.autocast(place.device.type, enabled=False):  # the teacher has half precision of its own
                lessons.append(teacher.teach(student, place, generator))
            del lessons[: -settings.kept]
            joined[:] = [join(lessons)]
        known = joined[0]
        rows = torch.randint(len(known.start), (settings.batch,), device=place.device, generator=generator)
        noisy = known.noisy[rows].contiguous(memory_format=torch.channels_last)
        predicted = student(noisy, known.start[rows], known.text[rows], return_dict=False)[0]
        loss: Tensor = (predicted.float() - known.velocity[rows]).square().mean()
        return loss

    training.run(loss_of, budget)
