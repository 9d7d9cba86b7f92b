"""benchmarks/quality.py on a tiny Wan: clips in place of images."""

import csv
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tiny_clips import FRAMES, SIZE, clip_folder
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from toma_lab.columns import ColumnSpec
from toma_lab.metrics import ClipSample, Weights, open_metrics
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.clips import ClipRequest, generate_clips

from toma_diffusion import apply_toma

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Row = dict[str, str]


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield patch


@pytest.fixture(scope="module")
def quality(patched) -> ModuleType:
    """Its clips are small, and nothing has been timed."""
    module = importlib.import_module("quality")
    small = replace(module.SETUPS["bundled-video"], size=SIZE, frames=FRAMES, time_of="nothing")
    patched.setattr(module, "SETUPS", {"bundled-video": small})
    return module


def invoke(quality: ModuleType, folder: Path, *options: str, code: int = 0) -> list[Row]:
    """The command with two prompts, at four steps."""
    arguments = ["--device", "cpu", "--images", "2", "--steps", "4", "--rows", str(folder), "--no-converged"]
    arguments += ["--lpips-weights", str(lpips_file(folder)), *options]
    if "--model" not in options:
        arguments += ["--model", str(clip_folder()), "--setup", "bundled-video"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quality.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            quality.main()
    assert ended.value.code == code
    (path,) = folder.glob("quality_*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


PARTS = [option for part in ("fewer steps", "presets", "frames", "skip", "reference") for option in ("--only", part)]


@pytest.fixture(scope="module")
def folder(quality, tmp_path_factory) -> Path:
    """With finished rows."""
    path = tmp_path_factory.mktemp("rows")
    invoke(quality, path, *PARTS, "--commit", "one")
    return path


@pytest.fixture
def rows(folder) -> list[Row]:
    with (folder / "quality_video_cpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def planned(quality: ModuleType, pipe, share: str = "1/1") -> dict[int, list]:
    return quality.plan(
        pipe, quality.SETUPS["bundled-video"], Namespace(steps="", only=None, share=share, learned=None)
    )


def found(rows: list[Row], run: str, title: str) -> Row:
    (row,) = [row for row in rows if (row["run"], row["title"]) == (run, title)]
    return row


def test_the_rows(rows, folder):
    assert {(row["model"], row["images"], row["frames"], row["resolution"]) for row in rows} == {
        ("bundled-video", "2", "9", "64x48")
    }
    assert str(clip_folder()) not in (folder / "quality_video_cpu.csv").read_text()
    baseline, floor = rows[:2]
    assert (baseline["title"], floor["title"]) == ("baseline", "noise floor")
    assert baseline["flicker"] == baseline["psnr"] == ""
    within = found(rows, "frames", "toma-stage 0.5, region_frames=1, region_tokens=256, skip_blocks=[]")
    over = found(rows, "frames", "toma-stage 0.5, region_frames=4, region_tokens=256, skip_blocks=[]")
    for row in (within, over):
        assert float(row["flicker"]) > float(floor["flicker"])
        assert float(row["lpips"]) > float(floor["lpips"])
    assert within["flicker"] != over["flicker"]
    preset = found(rows, "presets", "toma-stage 0.5, skip_blocks=[]")
    assert [preset[name] for name in ("psnr", "flicker")] == [over[name] for name in ("psnr", "flicker")]


def test_figures_are_those_of_toma_eval(rows, quality, tmp_path):
    """Each clip for itself, frame by frame."""
    pipe = load_pipeline(str(clip_folder()), "cpu")
    prompts = quality.CLIP_PROMPTS[0].read_text().splitlines()
    requests = [
        ClipRequest(prompts[index * (len(prompts) // 16)], index, 4, 4.0, *SIZE, frames=FRAMES) for index in (0, 1)
    ]
    whole = [generate_clips(pipe, [request])[0] for request in requests]
    with apply_toma(pipe, "toma-stage", ratio=0.5, skip_blocks=()):
        merged = [generate_clips(pipe, [request])[0] for request in requests]
    weights = Weights(lpips=lpips_file(tmp_path))
    metrics = open_metrics(("ssim", "lpips", "flicker"), weights, pipe.device, clips=True).clip
    samples = [ClipSample(own.frames, "", other.frames) for own, other in zip(merged, whole, strict=True)]
    row = found(rows, "presets", "toma-stage 0.5, skip_blocks=[]")
    assert len(metrics) == 3
    for metric in metrics:
        assert float(row[metric.name]) == pytest.approx(sum(metric.scores(samples)) / 2, rel=0.02)


def test_without_measured_steps_merging_has_no_gain(rows, quality, tmp_path, capsys):
    gains = {row["run"]: row["gain"] for row in rows if row["title"] != "noise floor"}
    assert gains == {"reference": "1.0000", "skip": "1.3333", "fewer steps": "2.0000", "presets": "", "frames": ""}
    invoke(quality, tmp_path, "--only", "fewer steps")
    assert "Left out: gains of bundled-video: there are no measured steps of 'nothing'" in capsys.readouterr().out


def test_the_same_command_measures_nothing_again(rows, quality, folder, capsys):
    assert invoke(quality, folder, *PARTS, "--commit", "one") == rows
    assert "4 steps, " not in capsys.readouterr().out


def test_shares_have_every_row_and_no_clip_twice(quality):
    pipe = load_pipeline(str(clip_folder()), "cpu")
    whole, *shares = (planned(quality, pipe, share)[20] for share in ("1/1", "1/3", "2/3", "3/3"))
    assert sorted(map(str, whole)) == sorted(str(each) for share in shares for each in share)
    generated = [{quality.settings_alone(variant) for _, variant in share} for share in shares]
    assert len(set.union(*generated)) == sum(map(len, generated)) < len(whole)


def test_what_fails_stops_nothing_else(quality, tmp_path, monkeypatch, capsys):
    figures = quality.Measurement.figures

    def failing(self, variant):
        if variant.title in ("noise floor", "3 steps"):
            raise RuntimeError("out of memory")
        return figures(self, variant)

    monkeypatch.setattr(quality.Measurement, "figures", failing)
    found = invoke(quality, tmp_path, "--only", "fewer steps", "--only", "reference", code=1)
    assert [row["title"] for row in found] == ["baseline", "2 steps"]
    said = capsys.readouterr().out
    assert "Failed: bundled-video, 4 steps, fewer steps: 3 steps: RuntimeError('out of memory')" in said


def test_fewer_methods_where_there_is_no_sweep(quality):
    for part in quality.CLIP_PARTS.values():
        everything, chosen = (
            {ColumnSpec.parse(each) for each in quality.methods_of(part, quality.Conditions(20, True, sweep), "")}
            for sweep in (True, False)
        )
        assert chosen <= everything
    wanted = planned(quality, load_pipeline(str(clip_folder()), "cpu"))
    assert list(wanted) == [20, 8, 50]
    counts = {steps: len({quality.settings_alone(each) for _, each in wanted[steps]}) for steps in wanted}
    assert max(counts[8], counts[50]) < counts[20] < 120


def test_a_part_of_images_is_left_out(quality, tmp_path, capsys):
    invoke(quality, tmp_path, "--only", "fewer steps", "--only", "guidance")
    assert "Left out: guidance: a WanPipeline has no such part." in capsys.readouterr().out


def test_older_rows_of_images_are_kept(quality, tmp_path):
    options = ("--model", str(pipeline_folder()), "--only", "fewer steps")
    measured = invoke(quality, tmp_path, *options, "--commit", "one")
    assert {(row["frames"], row["flicker"]) for row in measured} == {("", "")}
    path = tmp_path / "quality_pipeline_cpu.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in measured[0] if name not in ("frames", "flicker")])
        writer.writeheader()
        writer.writerows({name: row[name] for name in writer.fieldnames} for row in measured)
    assert invoke(quality, tmp_path, *options, "--commit", "one", "--gains") == measured


def test_gains_of_no_rows_make_no_file(quality, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--gains", "--setup", "bundled-video", "--rows", str(tmp_path)])
    with pytest.raises(SystemExit):
        quality.main()
    assert not [*tmp_path.glob("*.csv")]


def test_they_are_drawn(rows):
    plot = importlib.import_module("plot_quality")
    timed = [row | {"gain": row["gain"] or "1.5"} for row in rows]
    curves = plot.curves_of(timed)
    assert {"fewer steps", "toma-stage", "toma-stage within frames", plot.LINE_OF_PRESETS} <= set(curves)
    assert [point.label for point in curves["toma-stage within frames"]] == ["0.25", "0.5", "0.75"]
    assert [axis.get_title() for axis in plot.figure_of(timed).axes] == ["4 steps"]
