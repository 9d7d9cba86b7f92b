"""The method on an image, and the command that shows it."""

import csv
import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from toma_lab.cli import app
from toma_lab.inspection.photograph import RATIOS, SAMPLE, SELECTIONS, load_photograph, reconstructions
from typer.testing import CliRunner

from toma_diffusion import Merge


def psnr_by_cell(photograph: torch.Tensor, **settings) -> dict[tuple[str, float], float]:
    return {(r.selection, r.ratio): r.psnr for r in reconstructions(photograph, Merge(**settings))}


def test_an_image_comes_with_the_package():
    with Image.open(SAMPLE) as image:
        assert image.size == (512, 512)
    assert load_photograph().shape == (512, 512, 3)


class TestReconstructions:
    def test_facility_location_keeps_most_and_fewer_tokens_keep_less(self):
        psnr = psnr_by_cell(load_photograph(size=256))
        for ratio in RATIOS:
            assert psnr["facility-location", ratio] > max(psnr["random", ratio], psnr["strided", ratio])
        for selection in SELECTIONS:
            assert psnr[selection, 0.25] > psnr[selection, 0.5] > psnr[selection, 0.75]

    def test_token_counts(self):
        results = list(reconstructions(load_photograph(size=128), Merge(num_regions=4), selections=("strided",)))
        assert [(r.tokens_before, r.tokens_after, int(r.kept.sum())) for r in results] == [
            (256, 192, 192),
            (256, 128, 128),
            (256, 64, 64),
        ]


class TestCommand:
    def test_writes_the_picture_and_prints_the_table(self, tmp_path):
        output = tmp_path / "new folder" / "picture.png"
        result = CliRunner().invoke(app, ["explain", "--size", "128", "--output", str(output)], env={"COLUMNS": "120"})
        assert result.exit_code == 0, result.output
        assert Image.open(output).width > 1000
        assert all(selection in result.output for selection in SELECTIONS)
        assert "16×16 tokens in 64 tiles of 2×2" in result.output
        assert output.name in result.output
        rows = list(csv.DictReader(output.with_suffix(".csv").open()))
        assert [(row["selection"], float(row["ratio"])) for row in rows] == list(itertools.product(SELECTIONS, RATIOS))
        assert all(f"{float(row['psnr_db']):.2f}" in result.output for row in rows)
        assert {row["image"] for row in rows} == {"sample.jpg"}

    def test_own_image_of_an_odd_size_with_transparency(self, tmp_path):
        path = tmp_path / "odd.png"
        pixels = np.random.default_rng(0).integers(0, 255, (75, 131, 4), dtype=np.uint8)
        Image.fromarray(pixels, "RGBA").save(path)
        result = CliRunner().invoke(app, ["explain", str(path), "--output", str(tmp_path / "out.png")])
        assert result.exit_code == 0, result.output
        assert "9×16 tokens" in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["missing.png"], "'missing.png' does not exist"),
            ([__file__], "cannot be read as an image"),
            (["."], "'.' cannot be read as an image"),
            (["--region", "tiles"], "region='tiles' is not known"),
            (["--scale", "-1"], "scale=-1.0 is not allowed"),
            (["--size", "9"], "at least 16"),
            (["--output", "picture.txt"], "picture.txt"),
        ],
    )
    def test_wrong_input_is_quoted(self, arguments, message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "400"})
        assert result.exit_code == 2
        assert message in result.output
        assert list(tmp_path.iterdir()) == []

    def test_env_names_the_versions(self):
        result = CliRunner().invoke(app, ["env"])
        assert result.exit_code == 0
        assert torch.__version__ in result.output
