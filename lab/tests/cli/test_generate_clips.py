"""`toma generate` with video pipelines."""

import json

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from tiny_clips import FRAMES, SIZE, array, clip_folder
from tiny_text import pipeline_folder
from toma_lab.cli import app
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.clips import ClipRequest, generate, settings_path
from typer.testing import CliRunner

SMALL = ("--width", str(SIZE[0]), "--height", str(SIZE[1]), "--frames", str(FRAMES))
MERGING = ("--preset", "toma-stage:num_regions=4")


def invoke(*arguments: object, kind: str = "text"):
    model = ["--model", str(clip_folder(kind)), "--device", "cpu", "--steps", "2"]
    return CliRunner().invoke(app, ["generate", "a red apple", *model, *map(str, arguments)], env={"COLUMNS": "300"})


def decoded(path) -> np.ndarray:
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]).astype(int)


def test_a_clip_and_all_its_settings(tmp_path):
    output = tmp_path / "new" / "apple.mp4"
    result = invoke(*SMALL, *MERGING, "--seed", 3, "--fps", 8, "--output", output)
    assert result.exit_code == 0, result.output
    assert "9 frames of 64×48 at 8 per second" in result.output
    assert "36 → 20 tokens" in result.output  # 5 of every 9
    assert f"Wrote {output}, {settings_path(output)}" in result.output
    assert decoded(output).shape == (FRAMES, SIZE[1], SIZE[0], 3)
    settings = json.loads(settings_path(output).read_text())
    assert (settings["prompt"], settings["seed"], settings["steps"]) == ("a red apple", 3, 2)
    assert (settings["frames"], settings["fps"], settings["method"]) == (FRAMES, 8.0, MERGING[1])
    assert settings["column"]["own"]["merge"]["settings"]["num_regions"] == 4
    assert settings["model"] == clip_folder().name  # not its path
    assert str(clip_folder().parent).encode() not in output.read_bytes()


def test_compared_with_the_unmerged_clip(tmp_path):
    result = invoke(*SMALL, *MERGING, "--compare", "--output", tmp_path / "both.mp4")
    assert result.exit_code == 0, result.output
    assert "× as fast, PSNR " in result.output
    names = ["both-accelerated", "both-original", "both"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{ending}" for name in names for ending in ("mp4", "mp4.json")
    )
    merged, original, both = (decoded(tmp_path / f"{name}.mp4") for name in names)
    request = ClipRequest("a red apple", steps=2, width=SIZE[0], height=SIZE[1], frames=FRAMES)
    plain = array(generate(load_pipeline(str(clip_folder()), "cpu"), [request])[0])
    assert len(merged) == len(original) == len(both) == FRAMES
    assert np.abs(original - plain).mean() < np.abs(merged - plain).mean()
    left, right = both[:, 8:56, 8:72], both[:, 8:56, 80:144]  # with the white border of a sheet
    assert np.abs(left - original).mean() < 6
    assert np.abs(right - merged).mean() < 6
    of_original = json.loads((tmp_path / "both-original.mp4.json").read_text())
    assert of_original["column"] is None
    assert float(json.loads((tmp_path / "both.mp4.json").read_text())["psnr"]) > 0


def test_from_an_image(tmp_path):
    Image.new("RGB", (64, 48), "orange").save(tmp_path / "orange.png")
    image = ("--image", tmp_path / "orange.png")
    result = invoke(*SMALL, *MERGING, *image, "--output", tmp_path / "clip.mp4", kind="image")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "clip.mp4.json").read_text())["image"] == "orange.png"  # not its path
    assert decoded(tmp_path / "clip.mp4").shape == (FRAMES, SIZE[1], SIZE[0], 3)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("text", ("--output", "clip.png"), "'clip.png' does not fit a WanPipeline, which generates a clip"),
        ("text", ("--image", "nowhere.png"), "cannot be given to a WanPipeline"),
        ("image", (), "begins with an image: give one with --image"),
        ("image", ("--image", "nowhere.png"), "'nowhere.png' cannot be read"),
        ("text", ("--frames", "1"), "frames=1 is not allowed"),
        ("text", ("--width", "65", "--height", "48"), "divisible by 16"),
    ],
)  # fmt: skip
def test_wrong_input_is_quoted(kind, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, kind=kind)
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frames", "9"), "frames='9' is for clips, and a StableDiffusionPipeline generates images"),
        (("--fps", "9"), "fps='9.0' is for clips"),
        (("--image", "x.png"), "image='x.png' is for clips"),
        (("--output", "image.mp4"), "generates an image: end it in .png"),
    ],
)
def test_image_pipelines_refuse_what_is_for_clips(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--model", str(pipeline_folder()), "--device", "cpu", "--steps", "2"]
    result = CliRunner().invoke(app, ["generate", "a red apple", *model, *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())
