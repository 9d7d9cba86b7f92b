"""Pictures: as text, so that a page carries them itself, and several on one sheet."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toma_lab.pipelines.clips import read_clip

if TYPE_CHECKING:
    from PIL.Image import Image

QUALITY = 88
"""Of WebP. A 256×256 image then takes about 8 KiB instead of 90, and differences between methods stay visible."""
GAP = 8
INK, PAPER = "#1b1b1f", "white"


def data_uri(path: Path, most: int) -> tuple[str, int, int]:
    """An image file as a `data:` URI, shrunk to at most `most` pixels per side; its width and height."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image.thumbnail((most, most), Image.Resampling.LANCZOS)
    return _encode(image), image.width, image.height


@dataclass(frozen=True)
class Film:
    """All frames of a clip in one image, row by row. Clips that a script shows frame by frame stay in step, which
    animations that a browser plays do not."""

    uri: str
    width: int
    """Of one frame, as `height`."""
    height: int
    frames: int
    columns: int
    rows: int
    """The last may not be full."""
    fps: float


def film_of(path: Path, most: int) -> Film:
    """A clip file as a film, its frames shrunk to at most `most` pixels per side."""
    from PIL import Image

    clip = read_clip(path)
    frames = [frame.copy() for frame in clip.frames]
    for frame in frames:
        frame.thumbnail((most, most), Image.Resampling.LANCZOS)
    width, height = frames[0].size
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % columns * width, number // columns * height))
    return Film(_encode(sheet), width, height, len(frames), columns, rows, clip.fps)


def _encode(image: Image) -> str:
    written = io.BytesIO()
    image.save(written, format="WEBP", quality=QUALITY, method=4)
    return f"data:image/webp;base64,{base64.b64encode(written.getvalue()).decode()}"


def make_sheet(images: Sequence[Image], captions: Sequence[str], columns: int) -> Image:
    """Several images on one sheet, each with a caption below it. All get the size of the first; captions are wrapped to
    its width."""
    from matplotlib.font_manager import findfont
    from PIL import Image, ImageDraw, ImageFont

    width, height = images[0].size
    # A font with × and most alphabets, which Pillow's default font lacks.
    font = ImageFont.truetype(findfont("DejaVu Sans"), size=max(10, width // 22))
    letters = max(1, int(width / font.getlength("n")))
    texts = ["\n".join(line for part in each.split("\n") for line in textwrap.wrap(part, letters)) for each in captions]
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    caption_height = int(max(measure.multiline_textbbox((0, 0), text, font=font)[3] for text in texts)) + GAP
    size = (
        columns * (width + GAP) + GAP,
        math.ceil(len(images) / columns) * (height + caption_height + GAP) + GAP,
    )
    sheet = Image.new("RGB", size, PAPER)
    canvas = ImageDraw.Draw(sheet)
    for index, (image, text) in enumerate(zip(images, texts, strict=True)):
        left = GAP + index % columns * (width + GAP)
        top = GAP + index // columns * (height + caption_height + GAP)
        sheet.paste(image.convert("RGB").resize((width, height)), (left, top))
        canvas.multiline_text((left, top + height + GAP // 2), text, fill=INK, font=font)
    return sheet
