"""Pictures on pages and sheets."""

import base64
import io

import numpy as np
from PIL import Image
from tiny_clips import array, moving
from toma_lab.pipelines.clips import Clip, write_lossless
from toma_lab.report.pictures import GAP, film_of, make_sheet


def opened(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))).astype(int)


def test_every_frame_is_at_its_place_of_the_film(tmp_path):
    clip = moving(7, (48, 32))
    write_lossless(clip, tmp_path / "clip.png", {})
    film = film_of(tmp_path / "clip.png", 100)
    assert (film.width, film.height, film.frames, film.columns, film.rows, film.fps) == (48, 32, 7, 3, 3, 12.0)
    sheet = opened(film.uri)
    assert sheet.shape == (96, 144, 3)
    for number, frame in enumerate(array(clip).astype(int)):
        top, left = number // 3 * 32, number % 3 * 48
        assert np.abs(sheet[top : top + 32, left : left + 48] - frame).mean() < 12


def test_frames_are_shrunk_alike(tmp_path):
    write_lossless(Clip(moving(3, (80, 40)).frames, 8.0), tmp_path / "clip.png", {})
    film = film_of(tmp_path / "clip.png", 40)
    assert (film.width, film.height) == (40, 20)


def test_images_stand_in_rows_with_their_captions_below():
    colors = ("red", "lime", "blue")
    sheet = make_sheet([Image.new("RGB", (64, 48), color) for color in colors], ["one", "two × 2", "a\nb\nc"], 2)
    assert sheet.width == 2 * (64 + GAP) + GAP
    row = (sheet.height - GAP) // 2
    corners = [(GAP, GAP), (GAP + 64 + GAP, GAP), (GAP, GAP + row)]
    assert [sheet.getpixel(corner) for corner in corners] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    caption = sheet.crop((GAP, GAP + 48, GAP + 64, GAP + row - GAP)).convert("L")
    assert caption.getextrema()[0] < 100  # ink


def test_long_captions_are_wrapped_and_other_sizes_fitted():
    images = [Image.new("RGB", (64, 64)), Image.new("RGB", (32, 32))]
    short, long = make_sheet(images, ["a", "b"], 2), make_sheet(images, ["a", "many words " * 5], 2)
    assert long.width == short.width
    assert long.height > short.height
