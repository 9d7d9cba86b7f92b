"""Stage `samples` of the video model: a clip for every prompt in clip_prompts.txt, four frames of each on a sheet, and
all of them moving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from training.loop import Place, write_atomically
from training.progress import Progress
from training.samples import grid
from training.settings import WanSettings

PROMPTS = Path(__file__).with_name("clip_prompts.txt")
"""The first half of them are also for evaluation."""
BATCH = 8
SHOWN = 4
"""Frames of each clip on the sheet."""
COLUMNS, MOVING_COLUMNS = 4, 8
FRAME_SIZE = 128
FRAMES_PER_SECOND = 8


def clip_prompts() -> list[str]:
    """The prompts to look at."""
    return PROMPTS.read_text().splitlines()


def draw_clips(
    pipeline: Any, texts: list[str], settings: WanSettings, steps: int, guidance: float
) -> list[list[Image.Image]]:
    """The frames of one clip for every text, with the seed of the settings plus its place in the list as its seed."""
    clips: list[list[Image.Image]] = []
    seed, side = settings.seed, settings.image_size
    with Progress("samples") as progress:
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            generators = [torch.Generator().manual_seed(seed + start + index) for index in range(len(batch))]
            clips += pipeline(
                batch,
                height=side,
                width=side,
                num_frames=settings.frames,
                num_inference_steps=steps,
                guidance_scale=guidance,
                generator=generators,
                output_type="pil",
            ).frames
            progress.update(len(clips) / len(texts), f"{len(clips)} of {len(texts)}")
    return clips


def strip(clip: list[Image.Image]) -> Image.Image:
    """Some frames of a clip, from its first to its last, beside each other."""
    shown = Image.new("RGB", (SHOWN * FRAME_SIZE, FRAME_SIZE))
    for place in range(SHOWN):
        frame = clip[place * (len(clip) - 1) // (SHOWN - 1)]
        shown.paste(frame.resize((FRAME_SIZE, FRAME_SIZE)), (place * FRAME_SIZE, 0))
    return shown


def write_moving(clips: list[list[Image.Image]], captions: list[str], path: Path) -> None:
    """All clips at once, as an animated WebP, which browsers play."""
    small = [[frame.resize((FRAME_SIZE, FRAME_SIZE)) for frame in clip] for clip in clips]
    first, *others = (grid(list(frames), captions, MOVING_COLUMNS) for frames in zip(*small, strict=True))
    options = {"save_all": True, "append_images": others, "duration": 1000 // FRAMES_PER_SECOND, "loop": 0}
    write_atomically(path, lambda unfinished: first.save(unfinished, format="WEBP", quality=80, **options))


def generate_clip_samples(pipeline: Any, settings: WanSettings, place: Place, steps: int, guidance: float) -> Path:
    """Write `samples.png` and `samples.webp`."""
    texts = clip_prompts()
    clips = draw_clips(pipeline, texts, settings, steps, guidance)
    path = place.work / "samples.png"
    sheet = grid([strip(clip) for clip in clips], texts, COLUMNS)
    write_atomically(path, lambda unfinished: sheet.save(unfinished, format="PNG"))
    write_moving(clips, texts, place.work / "samples.webp")
    print(f"samples: {path}", flush=True)
    return path
