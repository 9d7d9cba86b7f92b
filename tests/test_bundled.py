"""The demo model: trained, small, and what its card says."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from diffusers import StableDiffusionPipeline
from safetensors import safe_open

from toma_diffusion import apply_toma
from toma_diffusion.pipelines.checkpoints import bundled_model
from toma_diffusion.pipelines.generation import ImageRequest, generate_image

ROOT = Path(__file__).parents[1]
LOGS = ("vae", "diffusion-1", "diffusion-2", "diffusion-3")
MIB = 2**20


@pytest.fixture(scope="module")
def pipe():
    pipe = StableDiffusionPipeline.from_pretrained(bundled_model(), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def colours(image):
    """The mean red, green and blue of an image's middle."""
    pixels = np.asarray(image, dtype=np.float64)
    side = len(pixels)
    return pixels[side // 4 : 3 * side // 4, side // 4 : 3 * side // 4].mean(axis=(0, 1))


def test_it_is_small_and_in_half_precision():
    files = [path for path in bundled_model().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 40 * MIB
    for path in bundled_model().rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} <= {"F16", "I64"}, path  # noqa: SIM118


def test_it_has_the_structure_of_sdxl_and_1024_tokens(pipe):
    assert pipe.unet.config.sample_size**2 == 1024
    assert pipe.unet.config.use_linear_projection
    assert set(pipe.unet.config.transformer_layers_per_block) == {2}
    assert pipe.scheduler.config.prediction_type == "v_prediction"


def test_images_show_what_the_prompt_says(pipe):
    red, blue = (
        generate_image(pipe, ImageRequest(f"3d emoji of a {colour} heart", steps=6)) for colour in ("red", "blue")
    )
    assert colours(red)[0] > 2 * colours(red)[2]
    assert colours(blue)[2] > 2 * colours(blue)[0]
    dark, light = (
        generate_image(pipe, ImageRequest(f"a photo of a {colour} t-shirt", steps=6)) for colour in ("black", "white")
    )
    assert colours(light).mean() > 1.5 * colours(dark).mean()


def test_merging_half_of_the_tokens_keeps_the_picture(pipe):
    request = ImageRequest("3d emoji of a red heart", steps=6)
    whole = np.asarray(generate_image(pipe, request), dtype=np.float64)
    with apply_toma(pipe, ratio=0.5):
        merged = np.asarray(generate_image(pipe, request), dtype=np.float64)
    assert 0 < np.square(merged - whole).mean() < 255**2 / 100  # above 20 dB
    assert np.array_equal(np.asarray(generate_image(pipe, request)), whole)


def test_the_logs_are_those_of_its_training():
    history = json.loads((bundled_model() / "training.json").read_text())
    assert len(history) == len(LOGS)
    for name, chapter in zip(LOGS, history, strict=True):
        with (ROOT / "training" / "logs" / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert int(rows[-1]["step"]) == chapter["steps"]
        assert float(rows[-1]["loss"]) < float(rows[0]["loss"])


def test_the_card_lists_every_stage():
    card = (bundled_model() / "README.md").read_text()
    for chapter in json.loads((bundled_model() / "training.json").read_text()):
        assert f"| {chapter['steps']:,} | {chapter['images']:,} of {chapter['different_images']:,} |" in card
