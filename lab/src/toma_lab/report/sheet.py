"""Puts several images on one sheet, each with a caption below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

GAP = 8
INK, PAPER = "#1b1b1f", "white"


def make_sheet(images: Sequence[Image], captions: Sequence[str], columns: int) -> Image:
    """Make a sheet. All images get the size of the first; captions are wrapped to its width."""
    from PIL import Image, ImageDraw

    width, height = images[0].size
    font = _font(width)
    canvas = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    texts = ["\n".join(_wrap(caption, width, font)) for caption in captions]
    caption_height = int(max(canvas.multiline_textbbox((0, 0), text, font=font)[3] for text in texts)) + GAP
    rows = -(-len(images) // columns)
    size = (columns * (width + GAP) + GAP, rows * (height + caption_height + GAP) + GAP)
    sheet = Image.new("RGB", size, PAPER)
    canvas = ImageDraw.Draw(sheet)
    for index, (image, text) in enumerate(zip(images, texts, strict=True)):
        left = GAP + index % columns * (width + GAP)
        top = GAP + index // columns * (height + caption_height + GAP)
        sheet.paste(image.convert("RGB").resize((width, height)), (left, top))
        canvas.multiline_text((left, top + height + GAP // 2), text, fill=INK, font=font)
    return sheet


def _font(width: int) -> FreeTypeFont:
    """A font with × and most alphabets, which Pillow's default font lacks."""
    from matplotlib.font_manager import findfont
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), size=max(10, width // 22))


def _wrap(caption: str, width: int, font: FreeTypeFont) -> list[str]:
    """Split a caption into lines no wider than the image. A word that is longer stays whole."""
    lines: list[str] = []
    for paragraph in caption.split("\n"):
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines
