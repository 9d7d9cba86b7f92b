"""Everything that is chosen rather than learnt: sizes, rates, batch sizes. One object, saved with every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Sizes and rates of one training. `FULL` is the demo model, `TINY` a smaller one for tests on a CPU."""

    seed: int = 0
    image_size: int = 256
    """Width and height of the images. The autoencoder divides it by eight: 32×32 latents, 1024 tokens."""

    vae_channels: tuple[int, int, int, int] = (32, 64, 96, 96)
    """Channels at 1/1, 1/2, 1/4 and 1/8 of the image: 2.4 M parameters, of which 1.5 M decode."""
    latent_channels: int = 4
    """More reconstruct better and are harder to generate."""
    vae_batch: int = 32
    vae_rate: float = 1e-3
    kl_weight: float = 1e-6
    """Higher keeps the latents closer to a normal distribution and loses more detail."""

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

    batch: int = 256
    diffusion_rate: float = 8e-4
    emoji_share: float = 0.75
    """Of the images drawn. There are a hundred times as many emoji by name as garments, and each has to be learnt."""
    concept_power: float = 1.0
    """Each of n images of one concept is drawn with a weight of 1/nᵖ: 1 draws every concept equally often, 0 every
    image."""
    caption_dropout: float = 0.1
    """How often the caption is left out, for classifier-free guidance."""
    caption_variants: int = 16
    """How many wordings of each caption are drawn before training."""

    warmup_steps: int = 200
    ema_decay: float = 0.999
    weight_decay: float = 0.01

    @property
    def latent_size(self) -> int:
        """Width and height of the latents."""
        return self.image_size // 8

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for checkpoints and the model card."""
        return asdict(self)


FULL = Settings()
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
