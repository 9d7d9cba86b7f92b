"""`toma demo`, with a tiny model in place of the demo model."""

import sys

import pytest
import toma_diffusion_demo
from PIL import Image
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from toma_lab.cli import app
from toma_lab.cli.demo import PROMPTS
from toma_lab.evaluate import EvalFolder
from typer.testing import CliRunner

TITLES = ["baseline", "balanced", "fast", "toma-stage 0.5", "2 steps"]


@pytest.fixture
def _tiny_model(monkeypatch):
    monkeypatch.setattr(toma_diffusion_demo, "model_folder", pipeline_folder)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["demo", "--device", "cpu", *arguments], env={"COLUMNS": "300"})


@pytest.mark.usefixtures("_tiny_model")
def test_everything_is_written_and_explained(tmp_path):
    output = tmp_path / "demo"
    result = invoke("--steps", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert [column.title for column in EvalFolder(output).plan.columns] == TITLES
    for word in (*TITLES, "speed-up", "PSNR", "SSIM"):
        assert word in result.output
    page = (output / "report.html").read_text()
    assert all(prompt in page for prompt in PROMPTS)
    assert 'id="merge-map"' in page
    grid = Image.open(output / "grid.png")
    assert grid.width > len(TITLES) * 64
    assert grid.height > len(PROMPTS) * 64

    # The last lines: which file to open, what the columns mean, which row is the default, and what not to expect.
    files, columns, default, limits = result.stdout.splitlines()[-4:]
    assert files.startswith(f"Open {output / 'report.html'}")
    assert str(output / "grid.png") in files
    assert "speed-up = baseline time / method time" in columns
    assert default.startswith("balanced is the default")
    assert "merging tokens saves more time" in limits

    # The same command again generates nothing, also with the weights of another metric. Other settings are refused,
    # unless the run is to start again.
    before = {path: path.stat().st_mtime_ns for path in output.rglob("images/*/*.png")}
    assert "LPIPS" not in invoke("--steps", "3", "--output", str(output)).output
    weights = str(lpips_file(tmp_path))
    assert "LPIPS" in invoke("--steps", "3", "--output", str(output), "--lpips-weights", weights).output
    assert {path: path.stat().st_mtime_ns for path in output.rglob("images/*/*.png")} == before
    refused = invoke("--steps", "1", "--output", str(output))
    assert refused.exit_code == 2
    assert "holds a run with other settings" in refused.output
    (output / "mine.txt").write_text("stays")
    assert invoke("--steps", "1", "--output", str(output), "--fresh").exit_code == 0
    assert EvalFolder(output).plan.steps == 1
    assert (output / "mine.txt").exists()


def test_without_the_model_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "toma_diffusion_demo", None)
    result = invoke("--output", str(tmp_path / "demo"))
    assert result.exit_code == 2
    assert "pip install 'toma-diffusion-lab[demo]'" in result.output
    assert "pip install ./demo-model" in result.output
    assert not (tmp_path / "demo").exists()
