"""Tries the training of a transformer on this machine, with made-up latents: does it run, and how fast?

`python -m training.probe --model flux|wan --text MODEL --compile`. What it compiles, training finds in the cache and
need not compile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from training import tokenizer as tokenizers
from training.attention import KERNELS, use_attention
from training.clip_latents import ClipBatches
from training.diffusion import Batches
from training.flux import Flow
from training.loop import Place, Training
from training.settings import FLUX, TINY_FLUX, TINY_WAN, WAN, FluxSettings, WanSettings
from training.wan import ClipFlow

IMAGES = 256
CLIPS, CHANNELS, PIXELS_PER_LATENT = 64, 4, 8


def made_up(settings: FluxSettings, place: Place) -> Batches:
    """Noise in place of latents, and random words of the vocabulary in place of captions."""
    assert place.text is not None
    tokenizer = tokenizers.load(place.text / "tokenizer")
    size, tokens = settings.latent_size, tokenizer.model_max_length
    words = torch.randint(len(tokenizer), (IMAGES, settings.caption_variants, tokens), device=place.device)
    words[..., -1] = tokenizer.eos_token_id
    return Batches(
        latents=torch.randn(IMAGES, 2, settings.latent_channels, size, size, device=place.device).half(),
        tokens=words,
        no_caption=words[0, 0],
        weights=torch.ones(IMAGES, device=place.device),
        mirror=torch.ones(IMAGES, dtype=torch.bool, device=place.device),
    )


def made_up_clips(settings: WanSettings, place: Place) -> ClipBatches:
    """The same for clips."""
    assert place.text is not None
    tokenizer = tokenizers.load(place.text / "tokenizer")
    words = torch.randint(len(tokenizer), (CLIPS, tokenizer.model_max_length), device=place.device)
    words[..., -1] = tokenizer.eos_token_id
    side = settings.image_size // PIXELS_PER_LATENT
    latents = torch.randn(CLIPS, settings.frames, CHANNELS, side, side, device=place.device)
    return ClipBatches(latents.half(), words, words[0])


Loss = Callable[[torch.Generator], Tensor]


def flux_losses(options: argparse.Namespace, place: Place) -> tuple[Training, dict[str, tuple[int, Loss]]]:
    """A training, and by what is drawn the images a step and the loss."""
    settings = TINY_FLUX if options.tiny else FLUX
    flow = Flow(settings, place, made_up(settings, place))
    sides = {spacing: settings.latent_size // spacing for spacing in (1, 2)}
    return flow.training(), {
        f"{side}×{side} latents, {flow.batch(spacing)} images": (flow.batch(spacing), partial(flow.loss, spacing))
        for spacing, side in sides.items()
    }


def wan_losses(options: argparse.Namespace, place: Place) -> tuple[Training, dict[str, tuple[int, Loss]]]:
    """The same of the video model."""
    settings = TINY_WAN if options.tiny else WAN
    flow = ClipFlow(settings, place, made_up_clips(settings, place))
    return flow.training(), {
        f"{frames} of {settings.frames} frames, {settings.batch} images": (settings.batch, partial(flow.loss, part))
        for part, frames in enumerate(settings.parts)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Take some steps of each size, and print the speed. The first of each, which may compile, does not count."""
    parser = argparse.ArgumentParser(prog="python -m training.probe", description=__doc__)
    parser.add_argument("--model", choices=("flux", "wan"), default="flux")
    parser.add_argument("--text", type=Path, required=True, help="the demo model")
    parser.add_argument("--steps", type=int, default=3, help="of each size, beyond the first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention", choices=KERNELS, default=KERNELS[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    use_attention(options.attention)
    with tempfile.TemporaryDirectory() as work:
        place = Place(Path(work), torch.device(options.device), options.compile, text=options.text)
        training, losses = (flux_losses if options.model == "flux" else wan_losses)(options, place)
        for name, (batch, loss_of) in losses.items():
            seconds = []
            for _ in range(1 + options.steps):
                start = time.monotonic()
                loss = training.advance(loss_of, rate=1e-4).item()
                seconds.append(time.monotonic() - start)
            speed = batch * options.steps / sum(seconds[1:])
            print(
                f"probe: {name} a step: {speed:.0f} images/s, first step {seconds[0]:.1f} s, loss {loss:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
