"""`toma eval` and `toma report` of a video pipeline."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from tiny_clips import FRAMES, SIZE, array, clip_folder
from tiny_text import PROMPTS, pipeline_folder
from toma_lab.cli import app
from toma_lab.evaluate import EvalFolder
from toma_lab.pipelines.clips import read_clip
from toma_lab.pipelines.generation import read_settings
from typer.testing import CliRunner

METHODS = ("--methods", "toma-stage:num_regions=4,steps:2", "--ratios", 0.5)
SMALL = ("--size", f"{SIZE[0]}x{SIZE[1]}", "--steps", 3)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS[:2]))
    return path


def invoke(prompts, output, *arguments: object, model: str | None = None):
    where = ["--model", model or str(clip_folder()), "--device", "cpu", "--prompts", prompts, "--output", output]
    return CliRunner().invoke(app, ["eval", *map(str, [*where, *SMALL, *arguments])], env={"COLUMNS": "300"})


@pytest.fixture(scope="module")
def run(prompts, tmp_path_factory):
    """A finished run, and what was printed."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    chosen = ("--frames", FRAMES, "--metrics", "psnr,ssim,flicker,fid")
    result = invoke(prompts, folder, *METHODS, *chosen)
    assert result.exit_code == 0, result.output
    return EvalFolder(folder), result.output, chosen


def rows(folder: EvalFolder) -> dict[str, dict[str, str]]:
    with (folder.path / "table.csv").open(newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_the_table(run):
    folder, printed, _ = run
    found = rows(folder)
    assert list(found) == ["baseline", "noise floor", "toma-stage", "steps"]
    assert {(row["frames"], row["resolution"], row["images"]) for row in found.values()} == {("9", "64x48", "2")}
    assert found["baseline"]["flicker"] == found["baseline"]["psnr"] == ""
    merged, floor = found["toma-stage"], found["noise floor"]
    assert float(merged["flicker"]) > float(floor["flicker"]) >= 0
    assert 10 < float(merged["psnr"]) < float(floor["psnr"])
    assert all(row["fid"] == "" for row in found.values())
    assert "Left out: fid: they compare single images with real ones, not clips." in printed
    assert "2 clips of 64x48, 9 frames, 3 steps" in printed
    assert "Flicker ↓" in printed


def test_the_clips_are_lossless_and_hold_their_settings(run):
    folder, _, _ = run
    plan = folder.plan
    for column in plan.columns:
        path = folder.picture(column, plan.items[1])
        clip, settings = read_clip(path), read_settings(path)
        assert array(clip).shape == (FRAMES, SIZE[1], SIZE[0], 3)
        assert (settings["prompt"], settings["frames"], settings["fps"]) == (PROMPTS[1], FRAMES, 16.0)
        assert settings["column"] == json.loads(json.dumps(column.to_dict()))
    baseline, merged = (array(read_clip(folder.picture(plan.columns[i], plan.items[0]))) for i in (0, 2))
    expected = np.abs(np.diff(merged.astype(float), axis=0) - np.diff(baseline.astype(float), axis=0)).mean()
    assert folder.item_row(plan.columns[2], plan.items[0])["flicker"] == pytest.approx(expected, rel=1e-4)


def test_the_same_command_goes_on_where_it_was(run, prompts):
    folder, _, chosen = run
    paths = [folder.picture(column, item) for column in folder.plan.columns for item in folder.plan.items]
    before, table = [path.read_bytes() for path in paths], rows(folder)
    (folder.path / "table.csv").unlink()
    lines = (folder.path / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "rows.jsonl").write_text("".join(lines[:-2]) + lines[-2][:40])  # killed while it scored
    kept = [path.stat().st_mtime_ns for path in paths]
    result = invoke(prompts, folder.path, *METHODS, *chosen)
    assert result.exit_code == 0, result.output
    assert [path.stat().st_mtime_ns for path in paths] == kept
    assert [path.read_bytes() for path in paths] == before
    assert rows(folder) == table


def test_clips_that_begin_with_an_image(prompts, tmp_path):
    for color in ("orange", "blue"):
        Image.new("RGB", SIZE, color).save(tmp_path / f"{color}.png")
    chosen = ("--frames", 5, "--methods", "steps:1", "--steps", 2, "--metrics", "flicker")
    model, folder = str(clip_folder("image")), tmp_path / "run"
    result = invoke(prompts, folder, *chosen, "--image", tmp_path / "orange.png", model=model)
    assert result.exit_code == 0, result.output
    assert float(rows(EvalFolder(folder))["steps"]["flicker"]) > 0
    assert str(tmp_path) not in (folder / "run.json").read_text()
    result = invoke(prompts, folder, *chosen, "--image", tmp_path / "blue.png", model=model)
    assert result.exit_code == 2
    assert "Its image is 'orange.png" in result.output


def test_the_report_plays_them_side_by_side(run):
    folder, _, _ = run
    result = CliRunner().invoke(app, ["report", str(folder.path)])
    assert result.exit_code == 0, result.output
    page = (folder.path / "report.html").read_text(encoding="utf-8")
    assert "2 clips of 64×48 pixels and 9 frames for each method" in page
    assert page.count('data-frames="9"') == 2 * len(folder.plan.columns)
    assert 'id="left"' in page
    assert 'id="right"' in page


@pytest.mark.parametrize(
    ("arguments", "model", "message"),
    [
        (("--frames", 9), "image", "frames='9' is for clips, and a StableDiffusionPipeline generates images"),
        (("--metrics", "flickr"), "clip", "metric 'flickr' is not known"),
        ((), "from image", "begins with an image"),
    ],
)
def test_wrong_input(arguments, model, message, prompts, tmp_path):
    models = {"image": pipeline_folder, "clip": clip_folder, "from image": lambda: clip_folder("image")}
    result = invoke(prompts, tmp_path / "run", *arguments, model=str(models[model]()))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "run").exists()
