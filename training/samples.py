"""Stage `samples`: one image for every prompt in prompts.txt, as a grid to look at before the model is accepted."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from training.loop import Place, write_atomically
from training.progress import Progress

PROMPTS = Path(__file__).with_name("prompts.txt")
COLUMNS = 8
CAPTION_HEIGHT = 34
BATCH = 16

Arguments = Callable[[Any, int, float], dict[str, Any]]
"""From a pipeline, a number of prompts and a guidance: the arguments for that guidance."""


def prompts() -> list[str]:
    """The prompts to look at."""
    return PROMPTS.read_text().splitlines()


def guidance_arguments(pipeline: Any, count: int, guidance: float) -> dict[str, Any]:
    """What most pipelines call it."""
    return {"guidance_scale": guidance}


def draw(
    pipeline: Any,
    texts: list[str],
    seed: int,
    steps: int,
    guidance: float,
    arguments: Arguments = guidance_arguments,
) -> list[Image.Image]:
    """One image for every text, with `seed` plus its place in the list as its seed."""
    images: list[Image.Image] = []
    with Progress("samples") as progress:
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(batch))]
            more = arguments(pipeline, len(batch), guidance)
            images += pipeline(batch, num_inference_steps=steps, generator=generators, **more).images
            progress.update(len(images) / len(texts), f"{len(images)} of {len(texts)}")
    return images


def decibels(images: list[Image.Image], others: list[Image.Image]) -> float:
    """The mean PSNR of images against others, in dB."""
    pairs = [
        np.stack([np.asarray(image, dtype=np.float64) for image in pair]) for pair in zip(images, others, strict=True)
    ]
    errors = [max(float(np.square(one - two).mean()), 1e-3) for one, two in pairs]
    return float(np.mean([10 * np.log10(255**2 / error) for error in errors]))


def grid(images: list[Image.Image], captions: list[str], columns: int = COLUMNS) -> Image.Image:
    """Images in rows, each with its caption below."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width, rows * (height + CAPTION_HEIGHT)), "white")
    canvas = ImageDraw.Draw(sheet)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = index % columns * width, index // columns * (height + CAPTION_HEIGHT)
        sheet.paste(image, (left, top))
        lines = textwrap.wrap(caption, max(8, width // 6))[:2]
        canvas.multiline_text((left + 4, top + height + 4), "\n".join(lines), fill="black")
    return sheet


def generate_samples(
    load: Callable[[Path], Any],
    seed: int,
    place: Place,
    steps: int,
    guidance: float,
    arguments: Arguments = guidance_arguments,
) -> Path:
    """Write `samples.png` with the pipeline that `load` makes of the folder `pipeline`."""
    folder = place.work / "pipeline"
    if not folder.exists():
        raise FileNotFoundError(f"There is no {folder}: run the stage export first.")
    images = draw(load(folder), prompts(), seed, steps, guidance, arguments)
    path = place.work / "samples.png"
    write_atomically(path, lambda unfinished: grid(images, prompts()).save(unfinished, format="PNG"))
    print(f"samples: {path}", flush=True)
    return path
