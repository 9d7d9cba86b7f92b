"""Stage `latents`: images, mirror images and captions are encoded once, and diffusion needs the data no more."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTokenizer

from training import tokenizer as tokenizers
from training.captions import colour_of, variant
from training.data import Dataset, load, to_float
from training.loop import HISTORY, Place, averaged, write_atomically
from training.models import build_vae
from training.progress import Progress
from training.settings import CaptionSettings, LatentSettings, UNetSettings

ENCODE_BATCH = 64


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """The latents' means, as they are and mirrored: [images, 2, channels, height, width]."""
    latents = []
    with Progress("latents") as progress:
        for start in range(0, len(pixels), ENCODE_BATCH):
            images = to_float(pixels[start : start + ENCODE_BATCH])
            both = [vae.encode(side).latent_dist.mean for side in (images, images.flip(-1))]
            latents.append(torch.stack(both, dim=1))
            progress.update((start + len(images)) / len(pixels), f"{start + len(images)} images")
    return torch.cat(latents)


@torch.no_grad()
def normalise(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Bring every channel to mean 0 and deviation 1, in the latents and, exactly, in the autoencoder that makes them.

    Its last layer before the latents and its first after them are 1×1 convolutions, which take up scale and shift.
    """
    deviation, mean = torch.std_mean(latents.float(), dim=(0, 1, 3, 4))  # [channels]
    shape = (1, 1, -1, 1, 1)
    to_moments, from_latents = vae.quant_conv, vae.post_quant_conv
    channels = len(mean)
    to_moments.weight[:channels] /= deviation[:, None, None, None]
    to_moments.bias[:channels] = (to_moments.bias[:channels] - mean) / deviation
    to_moments.bias[channels:] -= 2 * deviation.log()  # the second half are logarithms of variances
    from_latents.bias += from_latents.weight[:, :, 0, 0] @ mean
    from_latents.weight *= deviation[None, :, None, None]
    return (latents - mean.view(shape)) / deviation.view(shape)


def wordings(dataset: Dataset, settings: CaptionSettings) -> list[list[str]]:
    """For every image some wordings of its caption; the colour is named for photographs only."""
    chance = random.Random(settings.seed)
    texts = []
    for image, caption in zip(dataset.images, dataset.captions, strict=True):
        colour = colour_of(image) if caption.startswith("a photo") else None
        texts.append([variant(caption, colour, chance) for _ in range(settings.caption_variants)])
    return texts


def tokenise(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    """As the pipeline does it: cut and padded to the same length. [texts, tokens]"""
    encoded = tokenizer(
        texts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    )
    ids: Tensor = encoded.input_ids
    return ids


def prepare_latents(data: Path, settings: LatentSettings, place: Place, limit: int | None = None) -> None:
    """Write the folders `vae` (the autoencoder, normalised) and `tokenizer`, and `latents.pt`, unless they are there.

    A text encoder that has begun to learn one vocabulary could not go on with another.
    """
    path, trained = place.work / "latents.pt", place.start or place.work / "vae.pt"
    if path.exists() and path.stat().st_mtime_ns > trained.stat().st_mtime_ns:
        print(f"latents: {path} is there already", flush=True)
        return
    dataset = load(data, settings.image_size, limit)
    texts = wordings(dataset, settings)
    every_text = [text for image in texts for text in image]
    folder = place.work / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    if place.start:
        vae = AutoencoderKL.from_pretrained(place.start / "vae", local_files_only=True).to(place.device)
        latents = encode(vae, dataset.pixels(place.device))
        place.work.mkdir(parents=True, exist_ok=True)
        shutil.copy(place.start / HISTORY, place.work / HISTORY)
    else:
        vae = build_vae(settings)
        averaged(vae, trained)
        vae.to(place.device)
        latents = normalise(vae, encode(vae, dataset.pixels(place.device)))
    earlier = place.text or place.start
    if earlier:
        shutil.copytree(earlier / "tokenizer", folder)
        tokenizer = tokenizers.load(folder)
    else:
        assert isinstance(settings, UNetSettings)
        tokenizer = tokenizers.train(every_text, settings.vocabulary, settings.text_tokens, folder)
    tokens = tokenise(tokenizer, every_text).view(len(texts), settings.caption_variants, -1)

    vae.cpu().save_pretrained(place.work / "vae")
    state = {
        "latents": latents.to("cpu", torch.float16),
        "tokens": tokens.to(torch.int16),
        "no_caption": tokenise(tokenizer, [""])[0].to(torch.int16),
        "weights": dataset.weights(settings.emoji_share, settings.concept_power),
        "mirror": dataset.mirror,
    }
    write_atomically(path, lambda unfinished: torch.save(state, unfinished))
