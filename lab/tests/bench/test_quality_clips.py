"""benchmarks/quality.py on a tiny Wan: clips in place of images."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_clips import FRAMES, SIZE, clip_folder
from tiny_weights import lpips_file
from toma_lab.metrics import ClipSample, Weights, open_metrics
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.clips import ClipRequest, generate
from toma_lab.runner import Maker

from toma_diffusion import Merge, speed_up

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
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
    return importlib.import_module("table_rows").read_rows(path)


PARTS = [option for part in ("fewer steps", "presets", "frames", "skip", "reference") for option in ("--only", part)]


@pytest.fixture(scope="module")
def folder(quality, tmp_path_factory) -> Path:
    """With finished rows."""
    path = tmp_path_factory.mktemp("rows")
    invoke(quality, path, *PARTS, "--commit", "one")
    return path


@pytest.fixture
def rows(folder) -> list[Row]:
    return importlib.import_module("table_rows").read_rows(folder / "quality_video_cpu.csv")


def planned(quality: ModuleType, pipe, share: str = "1/1") -> dict[int, list]:
    job = quality.Job("", "bundled-video", quality.SETUPS["bundled-video"])
    return quality.wanted_of(pipe, job, Namespace(steps="", only=None, share=share, learned=None))


def found(rows: list[Row], run: str, title: str) -> Row:
    (row,) = [row for row in rows if (row["run"], row["title"]) == (run, title)]
    return row


def test_the_rows(rows, folder):
    assert {(row["model"], row["images"], row["frames"], row["resolution"]) for row in rows} == {
        ("bundled-video", "2", "9", "64x48")
    }
    assert str(clip_folder()) not in (folder / "quality_video_cpu.csv").read_text()
    baseline, floor = found(rows, "reference", "baseline"), found(rows, "reference", "noise floor")
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
    whole = [generate(pipe, [request])[0] for request in requests]
    with speed_up(pipe, merge=Merge(ratio=0.5, skip_blocks=())):
        merged = [generate(pipe, [request])[0] for request in requests]
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


def test_shares_have_every_row_and_no_clip_twice(quality):
    pipe = load_pipeline(str(clip_folder()), "cpu")
    whole, *shares = (planned(quality, pipe, share)[20] for share in ("1/1", "1/3", "2/3", "3/3"))
    assert sorted(map(str, whole)) == sorted(str(each) for share in shares for each in share)
    generated = [{column.alone() for _, column in share} for share in shares]
    assert len(set.union(*generated)) == sum(map(len, generated)) < len(whole)


def test_what_has_no_memory_stops_nothing_else(quality, tmp_path, monkeypatch, capsys):
    make = Maker.make

    def failing(maker, column, requests):
        if column.title in ("noise floor", "3 steps"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(maker, column, requests)

    monkeypatch.setattr(Maker, "make", failing)
    rows = invoke(quality, tmp_path, "--only", "fewer steps", "--only", "reference", code=1)
    assert [row["title"] for row in rows] == ["baseline", "2 steps"]
    said = capsys.readouterr().out
    assert "Failed: bundled-video, 4 steps, fewer steps: 3 steps: OutOfMemoryError: CUDA out of memory" in said
