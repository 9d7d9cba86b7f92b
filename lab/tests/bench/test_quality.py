"""benchmarks/quality.py: what can be asked for, rows that stay, and a small run of it all."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from tiny_text import pipeline_folder
from tiny_weights import lpips_file
from toma_lab.columns import ColumnSpec
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.generation import ImageRequest

from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("quality")


@pytest.fixture
def columns(quality):
    return importlib.import_module("quality_columns")


@pytest.fixture
def run(quality, tmp_path, monkeypatch):
    """The command on a tiny model, with two prompts. Returns its rows and what it printed."""
    weights = lpips_file(tmp_path)

    def invoke(*options: str) -> list[dict[str, str]]:
        small = ("--model", str(pipeline_folder()), "--images", "2", "--device", "cpu", "--rows", str(tmp_path))
        monkeypatch.setattr(sys, "argv", ["quality.py", *small, "--lpips-weights", str(weights), *options])
        with pytest.raises(SystemExit) as ended:
            quality.main()
        assert ended.value.code == 0
        return importlib.import_module("table_rows").read_rows(tmp_path / "quality_pipeline_cpu.csv")

    return invoke


COMPUTED = {"balanced": (0, 1, 2), "fast": (0, 1), "faster": (0,)}
QUICK = "--no-converged"


@pytest.mark.parametrize("steps", [4, 20])
def test_every_method_can_be_asked_for_once(columns, steps):
    at = columns.Conditions(steps, COMPUTED)
    for part in (*columns.PARTS.values(), *columns.CLIP_PARTS.values()):
        methods = columns.methods_of(part, at, "skip_blocks=()")
        assert len({ColumnSpec.parse(method) for method in methods}) == len(methods) > 0


def test_changes_are_made_where_they_count(columns):
    methods = ["steps:3", "toma-stage", "toma:scale=inf+steps:3", "tomesd", "toma-stage:skip_blocks=(0,)"]
    part = columns.Part(lambda at: methods)
    assert columns.methods_of(part, columns.Conditions(4), "skip_blocks=(1,)") == [
        "steps:3",
        "toma-stage:skip_blocks=(1,)",
        "toma:scale=inf;skip_blocks=(1,)+steps:3",
        "tomesd:skip_blocks=(1,)",
        "toma-stage:skip_blocks=(0,)",
    ]


@pytest.mark.parametrize(("steps", "expected"), [(4, [3, 2]), (20, [17, 16, 14, 12, 10, 8])])
def test_fewer_steps_save_more_and_more(columns, steps, expected):
    assert columns.fewer(steps) == expected


def test_rows_of_several_parts_and_steps(run, capsys):
    parts = ("--only", "fewer steps", "--only", "combined", "--only", "reference")
    rows = run(*parts, "--steps", "4,5", QUICK)
    assert [(row["steps"], row["title"]) for row in rows if row["run"] == "reference"] == [
        *(("4", "baseline"), ("4", "noise floor")),
        *(("5", "baseline"), ("5", "noise floor")),
    ]
    assert [row["title"] for row in rows if (row["run"], row["steps"]) == ("fewer steps", "5")] == [
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
    assert {row["lpips_converged"] for row in rows} == {""}
    assert "Left out: combined: toma-late+first-block-cache:threshold=0.1" in capsys.readouterr().out


class TestEqualCost:
    """Skipped steps next to what computes as many."""

    @pytest.fixture
    def rows(self, run):
        parts = [option for part in ("skip", "lists", "solvers", "steps") for option in ("--only", part)]
        return run(*parts, "--steps", "8", QUICK)

    def test_every_way_computes_as_many_steps(self, rows):
        found = {}
        for row in rows:
            found.setdefault(row["run"], []).append((row["computed"], row["gain"]))
        counts = [("6", "1.3333"), ("5", "1.6000"), ("4", "2.0000")]
        assert found.pop("reference") == [("8", "1.0000")]
        assert found.pop("solvers") == 3 * counts
        assert found == dict.fromkeys(("skip", "lists", "steps"), counts)
        assert {row["gain_source"] for row in rows} == {"computed steps"}

    def test_lists_are_those_of_the_presets(self, rows, quality):
        pipe = load_pipeline(str(pipeline_folder()), "cpu")
        computed = quality.computed_by_presets(pipe, ImageRequest("", steps=8))
        lists = [json.loads(row["column"])["shortcuts"][0]["settings"] for row in rows if row["run"] == "lists"]
        assert [tuple(each["computed"]) for each in lists] == [*computed.values()]
        presets = [row for row in rows if row["run"] == "skip"]
        assert [row["title"] for row in presets] == ["balanced", "fast", "faster"]
        assert all(float(row["lpips"]) > 0 for row in presets)

    def test_what_skips_nothing_is_no_list(self, run):
        """With 4 steps `balanced` computes all of them, and merges tokens."""
        rows = run("--only", "lists", "--only", "skip", "--steps", "4", QUICK)
        assert [row["computed"] for row in rows if row["run"] == "lists"] == ["3"]  # of `fast` and `faster`
        merged = next(row for row in rows if row["title"] == "balanced")
        assert merged["gain_source"] != "computed steps"


def test_what_was_learned_is_a_row_without_its_path(run, quality, tmp_path, capsys):
    pipe = load_pipeline(str(pipeline_folder()), "cpu")
    last = {step: (Weights(),) * 2 for step in (3, 5, 6)}
    learned = Learned(
        model_class=type(pipe.unet).__name__,
        num_steps=8,
        scheduler=type(pipe.scheduler).__name__,
        guidance=7.5,
        steps=(LearnedSteps(computed=(0, 1, 2, 4, 7), weights=last),),
    )
    path = tmp_path / "mine.json"
    path.write_text(learned.to_json())
    rows = run("--only", "skip", "--steps", "8", "--learned", str(path), QUICK)
    assert [row["title"] for row in rows[1:]] == ["balanced", "fast", "faster", "fast, learned"]
    assert (rows[-1]["changed"], rows[-1]["computed"], rows[-1]["gain"]) == ("learned", "5", "1.6000")
    assert "mine.json" not in (tmp_path / "quality_pipeline_cpu.csv").read_text()
    assert f"Left out: skip: balanced:learned={path}: nothing was learned for 6" in capsys.readouterr().out
    assert len(run("--only", "skip", "--steps", "9", "--learned", str(path), QUICK)) == len(rows) + 1 + 3
    assert "it was learned with 8 steps, and this run has 9" in capsys.readouterr().out


def test_distance_to_the_converged_pictures(run, quality, monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "CONVERGED_STEPS", 6)
    rows = run("--only", "steps", "--steps", "8")
    distances = {row["title"]: float(row["lpips_converged"]) for row in rows}
    assert distances.pop("6 steps") == 0
    assert all(distances.values())
    assert rows[0]["lpips"] == ""
    kept = {path.parent.name for path in (tmp_path / "local").glob("*/images/*/*.png")}
    assert kept == {"baseline", "converged-6"}


def test_pictures_of_the_model_as_it_is_are_made_once(run, tmp_path):
    run("--only", "steps", "--steps", "8", QUICK)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("local/*/images/*/*.png")}
    assert len(run("--only", "steps", "--only", "skip", "--steps", "8", QUICK)) == 1 + 3 + 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("local/*/images/*/*.png")} == kept


def test_the_same_command_measures_nothing_again_and_another_commit_does(run, capsys):
    first = run("--only", "fewer steps", "--steps", "4", "--commit", "one", QUICK)
    capsys.readouterr()
    assert run("--only", "fewer steps", "--steps", "4", "--commit", "one", QUICK) == first
    assert "4 steps, " not in capsys.readouterr().out
    again = run("--only", "fewer steps", "--steps", "4", "--commit", "two", QUICK)
    assert [row["title"] for row in again] == [row["title"] for row in first]
    assert {row["commit"] for row in again} == {"two"}


def test_processes_that_share_the_work_write_one_file(run):
    first = run("--only", "fewer steps", "--steps", "20", "--share", "1/2", QUICK)
    both = run("--only", "fewer steps", "--steps", "20", "--share", "2/2", QUICK)
    assert [row["title"] for row in first[1:]] == ["17 steps", "14 steps", "10 steps"]
    assert len(both) == 1 + 6


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
    rows = run("--only", "fewer steps", "--only", "presets", "--steps", "4", "--share", "1/3", QUICK)
    gains = {row["title"]: row["gain"] for row in rows}
    assert (gains["baseline"], gains["3 steps"]) == ("1.0000", "1.3333")
    assert rows == run("--gains")
    plot = importlib.import_module("plot_quality")
    curves = plot.curves_of(rows)
    assert [point.label for point in curves["fewer steps"]] == ["3"]
    source = tmp_path / "quality_pipeline_cpu.csv"
    monkeypatch.setattr(
        sys, "argv", ["plot_quality.py", "--rows", str(source), "--output", str(tmp_path / "front.svg")]
    )
    plot.main()
    drawn = (tmp_path / "front.svg").read_text()
    assert "prefers-color-scheme: dark" in drawn
    assert "fewer steps" in drawn
    assert plot.INK not in drawn
