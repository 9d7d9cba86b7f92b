"""Benchmarks of models of clips: their sizes, what their inputs are, and rows of small ones."""

import csv
from math import prod

import diffusers
import pytest
import torch
from tiny_clips import clip_folder
from toma_lab.bench.models import build, load
from toma_lab.bench.published import MODELS
from toma_lab.cli import app
from typer.testing import CliRunner

from toma_diffusion import UsageError
from toma_diffusion.families import find_family

CPU = torch.device("cpu")
TOKENS = {
    "wan": {(1280, 720, 81): 75_600, (832, 480, 81): 32_760},
    "wan-480p": {(832, 480, 81): 32_760},
    "wan-ti2v-5b": {(1280, 704, 121): 27_280},
    "ltx2": {(768, 512, 121): 6_144, (1536, 1024, 121): 24_576},
    "h3": {(1344, 768, 124): 37_296, (1344, 768, 345): 102_816},
    "hunyuan15": {(848, 480, 121): 49_290, (1280, 720, 121): 111_600},
}
"""Of the video, at width, height and frames. The first is the default."""
HERE = [name for name in TOKENS if hasattr(diffusers, MODELS[name].class_name)]


def invoke(*arguments: object):
    device = ["--device", "cpu", "--steps", "1", "--repeats", "1", "--bounds", "none"]
    return CliRunner().invoke(app, ["bench", *map(str, arguments), *device], env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", HERE)
def test_published_tokens(name):
    denoiser = build(name, small=False, device=CPU)
    assert denoiser.default_clip == next(iter(TOKENS[name]))
    for clip, tokens in TOKENS[name].items():
        inputs = denoiser.inputs(1, *clip)
        sample = inputs["hidden_states"]
        patch = 4 if "patch_size" in denoiser.config and name.startswith("wan") else 1
        assert (sample.shape[1] if sample.ndim == 3 else prod(sample.shape[2:]) // patch) == tokens
        if name == "h3":
            positions = inputs["position_ids"][inputs["video_indices"]]
            frames, rows, columns = (len(set(axis.tolist())) for axis in positions.unbind(1))
            assert (rows, columns, frames * rows * columns) == (24, 42, tokens)
        if name == "wan-ti2v-5b":
            assert inputs["timestep"].shape == (1, tokens)


def test_all_models_of_clips_are_here():
    assert set(TOKENS) == {name for name, published in MODELS.items() if published.clip}


@pytest.mark.parametrize("name", HERE)
def test_rows_of_small_ones(name, tmp_path):
    """The baseline of all; merging where the family has an adapter."""
    denoiser = build(name, small=True, device=CPU)
    merges = find_family(denoiser.model) is not None
    methods = "toma-stage:num_regions=4" if merges else ""
    few = ("--model", name, "--methods", methods, "--ratios", 0.5, "--output", tmp_path / "rows.csv")
    result = invoke(*few)
    assert result.exit_code == 0, result.output
    width, height, frames = denoiser.default_clip
    assert f"{frames} frames" in result.output
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["baseline", "toma-stage"][: 1 + merges]
    assert {(row["model"], row["resolution"], row["frames"]) for row in rows} == {
        (f"{name}-small", f"{width}x{height}", str(frames))
    }
    if not merges:
        pytest.skip(f"the baseline ran; there is no adapter for {type(denoiser.model).__name__}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "wan", "--frames", 8), "frames=8 is not allowed: this model makes 1, 5, 9, … (4·n + 1)"),
        (("--model", "sd15", "--frames", 9), "frames=9 is for models of clips, and 'sd15-small' makes images"),
        (("--model", "wan", "--resolution", 100), "multiples of 16"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message, tmp_path):
    result = invoke(*arguments, "--output", tmp_path / "rows.csv")
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "rows.csv").exists()


def test_a_decoder_that_makes_sixteen_pixels_of_a_latent():
    with pytest.raises(UsageError, match="'48x32' is not allowed: this model takes multiples of 32"):
        build("wan-ti2v-5b", small=True, device=CPU).inputs(1, 48, 32)


def test_a_folder_with_its_whole_pipeline(tmp_path):
    model = str(clip_folder())
    assert load(model, device=CPU).default_clip == (832, 480, 81)
    size = ("--resolution", "64x48", "--frames", 9, "--output", tmp_path / "rows.csv")
    result = invoke("--model", model, "--methods", "toma-stage:num_regions=4", "--ratios", 0.5, "--pipeline", *size)
    assert result.exit_code == 0, result.output
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["baseline", "toma-stage"]
    assert all(row["pipeline_s"] and row["frames"] == "9" for row in rows)
