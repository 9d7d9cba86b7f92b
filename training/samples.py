"""Stage `samples`: one image for every prompt in prompts.txt, as a grid to look at before the model is accepted."""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from training.export import load_pipeline
from training.loop import Place, write_atomically
from training.progress import Progress
from training.settings import Settings

PROMPTS = Path(__file__).with_name("prompts.txt")
COLUMNS = 8
CAPTION_HEIGHT = 34
BATCH = 16


def grid(images: list[Image.Image], captions: list[str]) -> Image.Image:
    """Images in rows, each with its caption below."""
    width, height = images[0].size
    rows = -(-len(images) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width, rows * (height + CAPTION_HEIGHT)), "white")
    canvas = ImageDraw.Draw(sheet)
    for index, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = index % COLUMNS * width, index // COLUMNS * (height + CAPTION_HEIGHT)
        sheet.paste(image, (left, top))
        lines = textwrap.wrap(caption, max(8, width // 6))[:2]
        canvas.multiline_text((left + 4, top + height + 4), "\n".join(lines), fill="black")
    return sheet


def generate_samples(
    settings: Settings, place: Place, steps: int, guidance: float, prompts: list[str] | None = None
) -> Path:
    """Write `samples.png`: every prompt with the seed of its place in the list."""
    folder = place.work / "pipeline"
    if not folder.exists():
        raise FileNotFoundError(f"There is no {folder}: run the stage export first.")
    prompts = prompts or PROMPTS.read_text().splitlines()
    pipeline = load_pipeline(folder, place.device)
    images: list[Image.Image] = []
    with Progress("samples") as progress:
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            seeds = range(settings.seed + start, settings.seed + start + len(batch))
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            images += pipeline(batch, num_inference_steps=steps, guidance_scale=guidance, generator=generators).images
            progress.update(len(images) / len(prompts), f"{len(images)} images")
    path = place.work / "samples.png"
    write_atomically(path, lambda unfinished: grid(images, prompts).save(unfinished, format="PNG"))
    print(f"samples: {path}", flush=True)
    return path
