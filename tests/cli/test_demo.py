"""`toma demo`, with a tiny model in the bundled one's place."""

import pytest
from PIL import Image
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from typer.testing import CliRunner

from toma_diffusion import checkpoints
from toma_diffusion.cli import app
from toma_diffusion.cli.demo import PROMPTS
from toma_diffusion.evaluation import RunFolder


@pytest.fixture
def _bundled(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "bundled").symlink_to(pipeline_folder())
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "package" / "checkpoints.py"))


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["demo", "--device", "cpu", *arguments], env={"COLUMNS": "300"})


@pytest.mark.usefixtures("_bundled")
def test_everything_is_written_and_told(tmp_path):
    output = tmp_path / "demo"
    result = invoke("--steps", "2", "--output", str(output))
    assert result.exit_code == 0, result.output
    titles = [
        "baseline",
        *(f"balanced {ratio}" for ratio in (0.25, 0.5, 0.75)),
        "fast 0.5",
        "tomesd 0.5",
        "tofu 0.5",
        "todo 0.75",
    ]
    assert [variant.title for variant in RunFolder(output).plan.variants] == titles
    for word in (*titles, "speed-up", "PSNR", "SSIM", "report.html", "grid.png"):
        assert word in result.output
    page = (output / "report.html").read_text()
    assert all(prompt in page for prompt in PROMPTS)
    assert 'id="merge-map"' in page
    grid = Image.open(output / "grid.png")
    assert grid.width > 7 * 64
    assert grid.height > len(PROMPTS) * 64

    # The same again draws nothing anew, also with the weights of another metric. Other settings are refused, unless
    # the run is to start over.
    drawn = {path: path.stat().st_mtime_ns for path in output.rglob("images/*/*.png")}
    assert "LPIPS" not in invoke("--steps", "2", "--output", str(output)).output
    weights = str(lpips_file(tmp_path))
    assert "LPIPS" in invoke("--steps", "2", "--output", str(output), "--lpips-weights", weights).output
    assert {path: path.stat().st_mtime_ns for path in output.rglob("images/*/*.png")} == drawn
    refused = invoke("--steps", "1", "--output", str(output))
    assert refused.exit_code == 2
    assert "Its steps is 2, now 1 is asked for" in refused.output
    (output / "mine.txt").write_text("stays")
    assert invoke("--steps", "1", "--output", str(output), "--fresh").exit_code == 0
    assert RunFolder(output).plan.steps == 1
    assert (output / "mine.txt").exists()


def test_without_the_model_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "__file__", str(tmp_path / "checkpoints.py"))
    result = invoke("--output", str(tmp_path / "demo"))
    assert result.exit_code == 2
    assert "the bundled model is not in this installation" in result.output
