"""Tries the training of the Flux-class model on this machine, with made-up latents: does it run, and how fast?

`python -m training.probe --text MODEL --compile`. What it compiles, training finds in the cache and need not compile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from training import tokenizer as tokenizers
from training.attention import KERNELS, use_attention
from training.diffusion import Batches
from training.flux import Flow
from training.loop import Place
from training.settings import FLUX, TINY_FLUX, FluxSettings

IMAGES = 256


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Take some steps of each size, and print the speed. The first of each, which may compile, does not count."""
    parser = argparse.ArgumentParser(prog="python -m training.probe", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the demo model")
    parser.add_argument("--steps", type=int, default=3, help="of each size, beyond the first")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--attention", choices=KERNELS, default=KERNELS[0])
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    use_attention(options.attention)
    settings = TINY_FLUX if options.tiny else FLUX
    with tempfile.TemporaryDirectory() as work:
        place = Place(Path(work), torch.device(options.device), options.compile, text=options.text)
        flow = Flow(settings, place, made_up(settings, place))
        training = flow.training()
        for spacing in (1, 2):
            seconds = []
            for _ in range(1 + options.steps):
                start = time.monotonic()
                loss = training.advance(partial(flow.loss, spacing), rate=1e-4).item()
                seconds.append(time.monotonic() - start)
            batch, speed = flow.batch(spacing), flow.batch(spacing) * options.steps / sum(seconds[1:])
            side = settings.latent_size // spacing
            print(
                f"probe: {side}×{side} latents, {batch} images a step: {speed:.0f} images/s, "
                f"first step {seconds[0]:.1f} s, loss {loss:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
