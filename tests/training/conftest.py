"""A data folder of sixteen small pictures, and one tiny training of all stages that several tests look at."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageDraw

from training import run

COLOURS = ("red", "green", "blue", "orange")


def webp(draw_on, colour):
    image = Image.new("RGB", (64, 64), "white")
    getattr(ImageDraw.Draw(image), draw_on)((12, 12, 52, 52), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP")
    return buffer.getvalue()


def write_set(path, files, captions, class_name):
    np.savez(
        path,
        blob=np.frombuffer(b"".join(files), dtype=np.uint8),
        off=np.cumsum([0, *map(len, files)]),
        label=np.zeros(len(files), dtype=np.int32),
        classes=json.dumps([class_name]),
        caption=json.dumps(captions),
        name=json.dumps(captions),
    )


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    shapes = [(shape, colour) for shape in ("ellipse", "rectangle") for colour in COLOURS]
    files = [webp(*shape) for shape in shapes]
    emoji = [f"3d emoji of {colour} {'apple' if shape == 'ellipse' else 'book'}" for shape, colour in shapes]
    clothes = ["a photo of shoes", "a photo of outwear", "a photo of t-shirt", "a photo of kids pants"] * 2
    write_set(folder / "fluent_emoji.npz", files, emoji, "Objects")
    write_set(folder / "clothing.npz", files, clothes, "Shirt")
    return folder


@pytest.fixture(scope="session")
def command(data):
    """Arguments of `training.run` for a stage with tiny networks."""
    return lambda stage, work, *more: [
        *(stage, "--data", str(data), "--work", str(work), "--tiny", "--device", "cpu", "--minutes", "5"),
        *more,
    ]


@pytest.fixture(scope="session")
def trained(command, tmp_path_factory):
    """The work folder after `all`."""
    work = tmp_path_factory.mktemp("work")
    run.main(command("all", work, "--steps", "25", "--sample-steps", "2"))
    return work
