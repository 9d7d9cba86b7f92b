"""Everything that is chosen rather than learnt: sizes, rates, batch sizes. One object, saved with every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What every training has: its rates and its averages."""

    seed: int = 0
    batch: int = 256
    warmup_steps: int = 200
    ema_decay: float = 0.999
    weight_decay: float = 0.01

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for checkpoints and the model card."""
        return asdict(self)


@dataclass(frozen=True)
class CaptionSettings(Settings):
    """A training on the captioned images as they are: which are drawn how often."""

    emoji_share: float = 0.75
    """Of the images drawn. There are a hundred times as many emoji by name as garments, and each has to be learnt."""
    concept_power: float = 1.0
    """Each of n images of one concept is drawn with a weight of 1/nᵖ: 1 draws every concept equally often, 0 every
    image."""
    caption_variants: int = 16
    """How many wordings of each caption are drawn before training."""


@dataclass(frozen=True)
class LatentSettings(CaptionSettings):
    """A training that begins with an autoencoder of its own."""

    image_size: int = 256
    """Width and height of the images."""
    vae_channels: tuple[int, ...] = (32, 64, 96, 96)
    """Channels at 1/1, 1/2, 1/4 and 1/8 of the image: 2.4 M parameters, of which 1.5 M decode."""
    vae_attention: bool = True
    """Between encoder and decoder, where the latents are few enough for it."""
    vae_compiled: bool = True
    """Whether `--compile` is for the autoencoder too: it takes a minute, which a short training does not win back."""
    latent_channels: int = 4
    """More reconstruct better and are harder to generate."""
    vae_batch: int = 32
    vae_rate: float = 1e-3
    kl_weight: float = 1e-6
    """Higher keeps the latents closer to a normal distribution and loses more detail."""
    pooled_weight: float = 0.0
    """Of the error of latents at half their size, which shall decode to the image at half its size. Training can then
    begin on such latents, and latents hold less that is fine in them but not in the image."""
    caption_dropout: float = 0.1
    """How often the caption is left out, for classifier-free guidance."""

    @property
    def latent_size(self) -> int:
        """Width and height of the latents. The autoencoder halves them once a level, but for the first."""
        return self.image_size >> (len(self.vae_channels) - 1)


@dataclass(frozen=True)
class UNetSettings(LatentSettings):
    """Sizes and rates of the demo model: 256 pixels, 32×32 latents, 1024 tokens."""

    unet_channels: tuple[int, ...] = (128, 192)
    """One entry a level: 1024 tokens, then 256. 15.2 M parameters together with the layers below."""
    transformer_layers: tuple[int, ...] = (2, 2)
    """Per attention, of which a level has three: six layers see 1024 tokens."""
    head_channels: int = 64
    text_channels: int = 192
    text_layers: int = 4
    text_tokens: int = 32
    """The longest prompt, start and end included. The longest wording of a caption has 21."""
    vocabulary: int = 2048
    diffusion_rate: float = 8e-4


@dataclass(frozen=True)
class FluxSettings(LatentSettings):
    """Sizes and rates of the Flux-class model: 192 pixels, 96×96 latents, packed by 2×2 to 48×48 = 2304 tokens."""

    image_size: int = 192
    vae_channels: tuple[int, ...] = (32, 48)
    vae_attention: bool = False
    vae_compiled: bool = False
    vae_batch: int = 16
    """Few images and many steps: the autoencoder has less than a minute."""
    vae_rate: float = 1.5e-3
    pooled_weight: float = 0.5

    heads: int = 4
    head_channels: int = 64
    joint_blocks: int = 2
    """Text and image with weights of their own: 2.4 M parameters each."""
    single_blocks: int = 7
    """Text and image with the same weights: 1 M parameters each."""
    diffusion_rate: float = 1.2e-3
    warmup_steps: int = 100
    ema_decay: float = 0.995
    """Shorter than usual: whole latents come last, for a thousand steps or so, and the average must not look past."""

    batch: int = 128
    small_share: float = 0.6
    """Of the time, at the beginning, in which latents have half their size: a quarter of the tokens."""
    large_batch: int = 32
    """Images a step after that. `batch` counts for the time before: as many tokens."""
    shift: float = 3.0
    """How much noise is preferred to signal, in training and in sampling: where a share s of the steps is left, the
    noise's share is shift·s/(1 + (shift - 1)·s). The more pixels, the more noise hides as much of the picture."""


@dataclass(frozen=True)
class FourStepSettings(CaptionSettings):
    """Sizes and rates of the distillation to four steps."""

    batch: int = 128
    rank: int = 12
    """Of the low-rank change to every layer: 2.9 MiB in half precision."""
    rate: float = 2e-3
    steps: int = 4
    """Of the student."""
    teacher_steps: int = 20
    """A multiple of the student's."""
    guidance: float = 4.0
    """Of the teacher. The student has none: one pass a step, not two."""
    own_share: float = 0.5
    """Of the pictures that go on from the student's own step rather than the teacher's: it learns to mend what it does
    wrong."""
    trajectories: int = 256
    """How many pictures the teacher draws at a time."""
    steps_between: int = 16
    """Between two times."""
    kept: int = 32
    """Times whose pictures are remembered."""
    warmup_steps: int = 100
    weight_decay: float = 0.0


@dataclass(frozen=True)
class WanSettings(Settings):
    """Sizes and rates of the video model: clips of 16 frames of 256 pixels, 16×16×16 = 4096 tokens."""

    image_size: int = 256
    """Width and height of a frame. The autoencoder begins as the demo model's, and makes one latent of 8×8 pixels."""
    vae_batch: int = 32
    vae_rate: float = 8e-4
    kl_weight: float = 1e-6
    frames: int = 16
    clips: int = 8192
    """How many are rendered: 1.1 GB of latents."""
    garments: int = 30
    """The most photographs of one kind of garment."""
    caption_dropout: float = 0.1

    heads: int = 6
    head_channels: int = 64
    feed_forward: int = 1024
    blocks: int = 7
    """2 M parameters each."""
    diffusion_rate: float = 1e-3
    warmup_steps: int = 100
    ema_decay: float = 0.995
    """Short, as in `FluxSettings`: whole clips come last."""

    batch: int = 512
    """Frames a step: of so many clips, or in the beginning parts of clips, as have them together."""
    parts: tuple[int, ...] = (1, 4, 16)
    """Frames of these parts, which are learnt one after the other: what things look like, then how they move."""
    part_ends: tuple[float, ...] = (0.4, 0.6, 1.0)
    """By which share of the time each is learnt."""
    shifts: tuple[float, ...] = (2.0, 3.0, 5.0)
    """How much noise is preferred to signal, as in `FluxSettings`: frames that resemble each other show more of the
    picture through the same noise. The last is also that of sampling."""

    @property
    def shift(self) -> float:
        """Of whole clips, in training and in sampling."""
        return self.shifts[-1]


FULL = UNetSettings()
TINY = replace(
    FULL,
    image_size=64,
    vae_channels=(8, 8, 16, 16),
    vae_batch=4,
    unet_channels=(16, 32),
    transformer_layers=(1, 1),
    head_channels=8,
    text_channels=16,
    text_layers=1,
    vocabulary=600,
    batch=4,
    caption_variants=4,
    warmup_steps=2,
)
"""Small enough for tests on a CPU, like those below."""
FLUX = FluxSettings()
TINY_FLUX = replace(
    FLUX,
    image_size=32,
    vae_channels=(8, 16),
    vae_batch=4,
    heads=1,
    head_channels=32,
    joint_blocks=1,
    single_blocks=1,
    batch=8,
    large_batch=4,
    caption_variants=4,
    warmup_steps=2,
)
FOUR_STEP = FourStepSettings()
TINY_FOUR_STEP = replace(
    FOUR_STEP,
    rank=2,
    teacher_steps=4,
    trajectories=2,
    steps_between=4,
    kept=2,
    batch=2,
    caption_variants=4,
    warmup_steps=2,
)
WAN = WanSettings()
TINY_WAN = replace(
    WAN,
    image_size=64,
    frames=4,
    clips=6,
    garments=2,
    vae_batch=4,
    heads=2,
    head_channels=16,
    feed_forward=32,
    blocks=2,
    batch=8,
    parts=(1, 2, 4),
    warmup_steps=2,
)
