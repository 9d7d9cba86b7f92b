"""benchmarks/quality.py: sweeps that can be asked for, rows that stay, and a small run of it all."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
from tiny_text import pipeline_folder
from tiny_weights import lpips_file

from toma_diffusion import ToMAConfig
from toma_diffusion.evaluation.variants import VariantSpec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality")


@pytest.fixture
def run(quality, tmp_path, monkeypatch):
    """The command on a tiny model, with two prompts. Returns its rows and what it printed."""
    weights = lpips_file(tmp_path)

    def invoke(*options: str) -> list[dict[str, str]]:
        small = ("--model", str(pipeline_folder()), "--limit", "2", "--device", "cpu", "--rows", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["quality.py", *small, "--lpips-weights", str(weights), *options])
        with pytest.raises(SystemExit) as ended:
            quality.main()
        assert ended.value.code == 0
        with (tmp_path / "quality_pipeline.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return invoke


@pytest.mark.skipif(not ToMAConfig.knows("region_tokens"), reason="the sweeps are of settings that come with it")
@pytest.mark.parametrize("steps", [4, 20])
def test_every_method_can_be_asked_for_once(quality, steps):
    at = quality.Conditions(steps, has_guidance=True)
    for part in (*quality.PARTS.values(), *quality.CLIP_PARTS.values()):
        methods = quality.methods_of(part, at, "skip_blocks=()")
        assert len({VariantSpec.parse(method) for method in methods}) == len(methods) > 0


def test_changes_are_made_where_they_count(quality):
    methods = ["steps:3", "toma-stage", "toma:scale=inf+steps:3", "tomesd", "toma-stage:skip_blocks=(0,)"]
    part = quality.Part(lambda at: methods)
    assert quality.methods_of(part, quality.Conditions(4, True), "skip_blocks=(1,)") == [
        "steps:3",
        "toma-stage:skip_blocks=(1,)",
        "toma:scale=inf;skip_blocks=(1,)+steps:3",
        "tomesd:skip_blocks=(1,)",
        "toma-stage:skip_blocks=(0,)",
    ]


@pytest.mark.parametrize(("steps", "expected"), [(4, [3, 2]), (20, [17, 16, 14, 12, 10, 8])])
def test_fewer_steps_save_more_and_more(quality, steps, expected):
    assert quality.fewer(steps) == expected


def test_rows_of_several_parts_and_steps(run, capsys):
    rows = run("--only", "steps", "--only", "combined", "--steps", "4,5")
    assert [(row["steps"], row["title"]) for row in rows if row["run"] == "reference"] == [
        *(("4", "baseline"), ("4", "noise floor")),
        *(("5", "baseline"), ("5", "noise floor")),
    ]
    assert [row["title"] for row in rows if (row["run"], row["steps"]) == ("steps", "5")] == [
        "4 steps",
        "3 steps",
        "2 steps",
    ]
    both = next(row for row in rows if row["title"].startswith("toma-stage 0.5") and row["title"].endswith("+ 3 steps"))
    assert (both["method"], both["ratio"], both["shortcuts"], both["images"]) == (
        "toma-stage+steps",
        "0.5",
        "steps:3",
        "2",
    )
    floor = next(row for row in rows if (row["title"], row["steps"]) == ("noise floor", both["steps"]))
    assert float(floor["lpips"]) < float(both["lpips"])
    assert both["commit"]
    assert "Left out: combined: toma-late+first-block-cache:threshold=0.1" in capsys.readouterr().out


def test_the_same_command_measures_nothing_again_and_another_commit_does(run, capsys):
    first = run("--only", "steps", "--steps", "4", "--commit", "one")
    capsys.readouterr()
    assert run("--only", "steps", "--steps", "4", "--commit", "one") == first
    assert "4 steps, " not in capsys.readouterr().out
    again = run("--only", "steps", "--steps", "4", "--commit", "two")
    assert [row["title"] for row in again] == [row["title"] for row in first]
    assert {row["commit"] for row in again} == {"two"}


def test_processes_that_share_the_work_write_one_file(run):
    first = run("--only", "steps", "--steps", "20", "--share", "1/2")
    both = run("--only", "steps", "--steps", "20", "--share", "2/2")
    assert [row["title"] for row in first[2:]] == ["17 steps", "14 steps", "10 steps"]
    assert len(both) == 2 + 6


def test_one_part_alone_leaves_the_rows_of_others(run):
    run("--only", "steps", "--steps", "4")
    rows = run("--only", "table7", "--steps", "4")
    assert [row["run"] for row in rows] == ["reference"] * 2 + ["steps"] * 2 + ["table7"] * 4


def test_a_model_that_is_not_there_is_left_out_or_an_error_if_it_was_named(quality, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quality, "SETUPS", {"nowhere": quality.Setup()})
    monkeypatch.setattr(sys, "argv", ["quality.py", "--rows", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        quality.main()
    assert ended.value.code == 0
    assert "Left out: model 'nowhere' is not known" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["quality.py", "--rows", str(tmp_path), "--model", "nowhere"])
    with pytest.raises(SystemExit, match="Error: model 'nowhere' is not known"):
        quality.main()


def test_gains_are_computed_and_drawn(run, quality, tmp_path, monkeypatch):
    rows = run("--only", "steps", "--only", "presets", "--steps", "4", "--share", "1/3")
    gains = {row["title"]: row["gain"] for row in rows}
    assert (gains["baseline"], gains["noise floor"], gains["3 steps"]) == ("1.0000", "", "1.3333")
    assert rows == run("--gains")
    plot = importlib.import_module("plot_quality")
    curves = plot.curves_of(rows)
    assert [point.label for point in curves["fewer steps"]] == ["3"]
    source = tmp_path / "quality_pipeline.csv"
    monkeypatch.setattr(
        sys, "argv", ["plot_quality.py", "--rows", str(source), "--output", str(tmp_path / "front.svg")]
    )
    plot.main()
    drawn = (tmp_path / "front.svg").read_text()
    assert "prefers-color-scheme: dark" in drawn
    assert "fewer steps" in drawn
    assert plot.INK not in drawn
