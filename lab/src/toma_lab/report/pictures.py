"""Images and clips as text, so that a page carries them itself."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toma_lab.pipelines.clips import read_clip

if TYPE_CHECKING:
    from PIL.Image import Image

QUALITY = 88
"""Of WebP. A 256×256 image then takes about 8 KiB instead of 90, and differences between methods stay visible."""


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
    fps: float

    @property
    def rows(self) -> int:
        """The last may not be full."""
        return -(-self.frames // self.columns)


def film_of(path: Path, most: int) -> Film:
    """A clip file as a film, its frames shrunk to at most `most` pixels per side."""
    from PIL import Image

    clip = read_clip(path)
    frames = [frame.copy() for frame in clip.frames]
    for frame in frames:
        frame.thumbnail((most, most), Image.Resampling.LANCZOS)
    width, height = frames[0].size
    film = Film("", width, height, len(frames), math.ceil(math.sqrt(len(frames))), clip.fps)
    sheet = Image.new("RGB", (film.columns * width, film.rows * height))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % film.columns * width, number // film.columns * height))
    return Film(_encode(sheet), width, height, film.frames, film.columns, film.fps)


def _encode(image: Image) -> str:
    written = io.BytesIO()
    image.save(written, format="WEBP", quality=QUALITY, method=4)
    return f"data:image/webp;base64,{base64.b64encode(written.getvalue()).decode()}"
