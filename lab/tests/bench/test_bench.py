"""The command `toma bench`, on small models."""

import csv
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import diffusers
import pytest
import torch
from checkpoint import save_checkpoint
from tiny_clips import clip_folder
from toma_lab.bench.group import BASELINE, Group, with_bounds
from toma_lab.bench.runner import Runner
from toma_lab.bench.timing import Timing
from toma_lab.bench.turns import Turns
from toma_lab.bench.zoo import MODELS, build
from toma_lab.cli import app
from toma_lab.columns import ColumnSpec
from toma_lab.facts import Facts, gather_facts, head_of_package
from toma_lab.folder import locked
from toma_lab.parsing import Resolution
from toma_lab.rows import COLUMNS, Rows
from typer.testing import CliRunner

from toma_diffusion.families import find_family
from toma_diffusion.merge import Action, MergePlan

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--size", "small", "--resolution", "128", "--steps", "3", "--repeats", "2"]
METHODS = "toma,toma-stage:select_every=2"
SD15 = ["--model", "sd15", *QUICK, "--methods", METHODS, "--ratios", "0.5", "--modes", "eager"]
STAGE = ["--methods", "toma-stage:num_regions=4", "--ratios", "0.5", "--bounds", "none"]
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


def rows_of(path: Path, *arguments: object, exit_code: int = 0) -> list[dict[str, str]]:
    """Those that the command writes to this file."""
    result = invoke(*arguments, "--output", path)
    assert result.exit_code == exit_code, result.output
    return read(path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of the command; tests that write take a copy of its file."""
    path = tmp_path_factory.mktemp("bench") / "rows.csv"
    updates, update = [], MergePlan.update

    def spy(plan, tokens, action):
        updates.append((plan.config.scope, id(plan), action))
        update(plan, tokens, action)

    MergePlan.update = spy
    try:
        result = invoke(*SD15, "--output", path)
    finally:
        MergePlan.update = update
    assert result.exit_code == 0, result.output
    return path, result.output, updates


@pytest.fixture
def copied(finished, tmp_path):
    return Path(shutil.copy(finished[0], tmp_path))


class TestFiles:
    def test_two_at_once_need_two_files(self, tmp_path):
        """Each writes its file as a whole: of three benchmarks that shared one, the rows of two were gone."""
        path = tmp_path / "new" / "rows.csv"
        with locked(path.with_name(".rows.csv.lock"), "this test is at work"):
            result = invoke(*SD15, "--output", path, "--fresh")
        assert result.exit_code == 2
        assert "another benchmark is writing" in result.output
        assert not path.exists()

    def test_rows_and_turns_need_two_files(self, tmp_path):
        """The rows replace their file, and with it the lock."""
        result = invoke(*SD15, "--output", tmp_path / "rows.csv", "--take-turns", tmp_path / "rows.csv")
        assert result.exit_code == 2
        assert "give each a file of its own" in result.output

    @pytest.mark.parametrize("path", sorted(RESULTS.glob("*_h200.csv")), ids=lambda path: path.stem)
    def test_published_rows_have_the_columns_of_today(self, path):
        if "method" in (rows := read(path))[0]:
            assert set(rows[0]) <= set(COLUMNS)


class TestRows:
    def test_baseline_first_and_bounds_before_their_method(self, finished):
        rows = read(finished[0])
        assert [(row["method"], row["scope"]) for row in rows] == [
            ("baseline", ""),
            ("lower-bound", "module"),
            ("floor", "module"),
            ("toma", "module"),
            ("lower-bound", "stage"),
            ("floor", "stage"),
            ("toma-stage", "stage"),
        ]
        assert {(row["model"], row["resolution"], row["mode"], row["compile"], row["steps"]) for row in rows} == {
            ("sd15-small", "128x128", "eager", "none", "3")
        }
        assert json.loads(rows[-1]["settings"]) == {"select_every": 2, "skip_blocks": [-1]}

    def test_ratios_of_times_are_those_of_the_same_run(self, finished):
        baseline, bound, floor, toma, *_ = rows = read(finished[0])
        for row in rows:
            assert row["baseline_ms"] == baseline["step_ms"]
            assert float(row["speedup"]) == pytest.approx(float(row["baseline_ms"]) / float(row["step_ms"]), rel=1e-3)
            assert float(row["step_ms_p20"]) <= float(row["step_ms"]) <= float(row["step_ms_p80"])
        assert (toma["lower_bound_ms"], toma["floor_ms"]) == (bound["step_ms"], floor["step_ms"])
        over = float(toma["step_ms"]) / float(bound["step_ms"]) - 1
        assert float(toma["over_lower_bound"]) == pytest.approx(over, abs=1e-3)
        assert baseline["lower_bound_ms"] == bound["floor_ms"] == ""
        assert len({row["baseline_drift"] for row in rows}) == 1

    def test_the_schedule_really_happened_in_every_run(self, finished):
        """Warm-up and two repeats: three runs of three steps. Bounds never select."""
        for scope, selections in (("module", 1), ("stage", 2)):
            selected = [plan for each, plan, action in finished[2] if each == scope and action is Action.SELECT]
            assert {selected.count(plan) for plan in set(selected)} == {3 * selections}

    def test_table(self, finished):
        for text in (
            "sd15-small, 128x128, batch 2, float32, 3 steps, eager",
            "1.00×",
            "lower-bound",
            "toma-stage",
            "rows.csv",
        ):
            assert text in finished[1]


@pytest.mark.slow
class TestResuming:
    def test_nothing_is_measured_twice(self, copied):
        before = copied.read_bytes()
        result = invoke(*SD15, "--output", copied)
        assert result.exit_code == 0
        assert "Nothing to do" in result.output
        assert copied.read_bytes() == before

    def test_a_missing_method_comes_with_its_baseline_and_bounds(self, copied):
        lines = copied.read_text().splitlines(keepends=True)
        copied.write_text("".join(lines[:-1]))
        rows = rows_of(copied, *SD15)
        assert [row["method"] for row in rows[6:]] == ["baseline", "lower-bound", "floor", "toma-stage"]
        assert {row["baseline_ms"] for row in rows[6:]} == {rows[6]["step_ms"]}
        assert rows[-1]["floor_ms"] == rows[8]["step_ms"]

    def test_rows_of_other_code_or_machines_do_not_count(self, copied):
        denoiser = build("sd15", small=True, device=CPU)
        group = Group(denoiser.name, Resolution(128, 128), 2, "eager", "block", 3, "float32")
        specs = [ColumnSpec.parse(text) for text in METHODS.split(",")]
        columns = with_bounds(denoiser.model, specs, (0.5,), ("lower-bound", "floor"))
        facts = gather_facts(CPU)

        def to_do(facts: Facts, make_parts=None, **changes):
            groups = [replace(group, **changes)]
            return Runner(groups, denoiser, columns, 2, Rows(copied), facts, make_parts, None, Turns()).missing(*groups)

        assert to_do(facts) == []
        for field in asdict(facts):
            assert len(to_do(replace(facts, **{field: "another"}))) == 7
        assert len(to_do(facts, steps=4)) == len(to_do(facts, batch=1)) == 7
        without_pipeline = to_do(facts, lambda: None)  # those rows have no time of the pipeline
        assert len(without_pipeline) == 7
        assert without_pipeline[0] is BASELINE

    def test_fresh_starts_over(self, copied):
        rows = rows_of(copied, "--model", "sd15", *QUICK, *STAGE, "--fresh", "--commit", "abc")
        assert [(row["method"], row["commit"]) for row in rows] == [("baseline", "abc"), ("toma-stage", "abc")]


def test_a_baseline_that_changes_is_reported(tmp_path, monkeypatch):
    """The first baseline takes 40 ms a step, the one at the end 10 ms: as happened on a busy machine."""
    times = iter([40.0, 5.0, 10.0])
    monkeypatch.setattr("toma_lab.bench.measure.time_runs", lambda *_: Timing.of([next(times)]))
    path = tmp_path / "rows.csv"
    result = invoke("--model", "sd35", *QUICK, *STAGE, "--output", path)
    assert "the baseline took 40 ms at the beginning and 10 ms at the end" in result.output
    drifts = [(row["method"], float(row["baseline_drift"])) for row in read(path)]
    assert drifts == [("baseline", -0.75), ("toma-stage", -0.75)]


class TestFailures:
    def test_one_cell_fails_and_the_others_go_on(self, tmp_path, monkeypatch):
        """The same command tries it again."""
        merge, path = MergePlan.merge, tmp_path / "rows.csv"

        def out_of_memory(plan, tokens):
            if plan.config.scope == "block":
                raise torch.OutOfMemoryError("tried to allocate\nmore than there is")
            return merge(plan, tokens)

        methods = ["--methods", "toma-once,toma-stage:num_regions=16", "--ratios", "0.5", "--bounds", "none"]
        with monkeypatch.context() as patched:
            patched.setattr(MergePlan, "merge", out_of_memory)
            result = invoke("--model", "sd35", *QUICK, *methods, "--output", path)
        assert result.exit_code == 1
        assert "Failed: toma-once, block, ratio 0.5" in result.output
        assert "OutOfMemoryError: tried to allocate" in result.output
        assert [row["method"] for row in read(path)] == ["baseline", "toma-stage"]
        rows = rows_of(path, "--model", "sd35", *QUICK, *methods)
        assert [row["method"] for row in rows[2:]] == ["baseline", "toma-once"]

    def test_graph_is_refused_on_a_cpu_and_the_rest_goes_on(self, tmp_path):
        path = tmp_path / "rows.csv"
        result = invoke("--model", "sd35", *QUICK, "--methods", "", "--modes", "eager,graph", "--output", path)
        assert result.exit_code == 0, result.output
        assert "mode 'graph' needs a GPU" in result.output
        assert [(row["method"], row["mode"]) for row in read(path)] == [("baseline", "eager")]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--model", "sdxxl"], "'sdxxl'"),
            (["--size", "huge"], "'huge'"),
            (["--methods", "toma:scope=all"], "scope='all'"),
            (["--ratios", "half"], "'half'"),
            (["--ratios", "1.5"], "ratio=1.5"),
            (["--resolution", "100"], "'100'"),
            (["--batch", "two"], "'two'"),
            (["--modes", "fastest"], "'fastest'"),
            (["--modes", "graph"], "'graph' needs a GPU"),
            (["--compile", "some"], "'some'"),
            (["--dtype", "int8"], "'int8'"),
            (["--device", "tpu"], "'tpu'"),
            (["--cache", "0.1"], "--cache 0.1"),
            (["--model", "z-image", "--pipeline"], "the decoder of model 'z-image'"),
            (["--frames", "9"], "frames=9 is for models of clips, and 'sd15-small' makes images"),
            (["--model", "wan", "--frames", "8"], "frames=8 is not allowed: this model makes 1, 5, 9, … (4·n + 1)"),
            (["--model", "wan", "--resolution", "100"], "multiples of 16"),
        ],
    )
    def test_wrong_input_is_quoted(self, arguments, message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        result = invoke("--model", "sd15", *QUICK, *arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("ratios", "is_said"), [([], False), (["--ratios", "0.25,0.75"], True)])
    def test_left_out_are_only_ratios_that_were_asked_for(self, ratios, is_said, tmp_path):
        few = ["--model", "sd15", *QUICK, "--methods", "todo", "--bounds", "none", *ratios]
        result = invoke(*few, "--output", tmp_path / "rows.csv")
        assert result.exit_code == 0, result.output
        assert ("Left out: todo cannot have ratio 0.25" in result.output) is is_said


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if hasattr(diffusers, model["class"])])
def test_every_model_known_by_name_is_measured(name, tmp_path):
    """Merging, skipped steps, and both: of five steps some are skipped."""
    denoiser = build(name, small=True, device=CPU)
    if find_family(denoiser.model) is None:
        pytest.skip(f"there is no family for {type(denoiser.model).__name__}")
    width, height, frames = denoiser.default_size
    few = ["--device", "cpu", "--size", "small", "--steps", "5", "--repeats", "1", "--bounds", "none"]
    few += ["--ratios", "0.5"]
    few += ["--methods", "toma-stage:num_regions=4,fast:computed=3"]
    few += ["--resolution", "128"] if frames is None else []
    result = invoke("--model", name, *few, "--output", tmp_path / "rows.csv")
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.output.replace("Warning: the baseline took", "")  # times are those of a busy machine
    rows = read(tmp_path / "rows.csv")
    assert [row["method"] for row in rows] == ["baseline", "toma-stage", "fast"]
    size = "128x128" if frames is None else f"{width}x{height}"
    assert {(row["model"], row["batch"], row["resolution"], row.get("frames", "")) for row in rows} == {
        (f"{name}-small", str(MODELS[name]["batch"]), size, str(frames or ""))
    }


class TestMore:
    @pytest.mark.parametrize("model", ["sdxl", "flux", "sd35"])
    def test_whole_pipeline(self, model, tmp_path):
        baseline, stage = rows_of(tmp_path / "rows.csv", "--model", model, *QUICK, *STAGE, "--pipeline")
        assert stage["baseline_pipeline_s"] == baseline["pipeline_s"]
        assert float(stage["pipeline_s"]) > 0

    def test_cache(self, tmp_path):
        rows = rows_of(tmp_path / "rows.csv", "--model", "flux", *QUICK, *STAGE, "--cache", "1000")
        hits = [(row["cache"], float(row["cache_hits"])) for row in rows]
        assert hits == [("1000", pytest.approx(2 / 3, abs=1e-3))] * 2

    def test_a_checkpoint_of_ones_own(self, tmp_path):
        save_checkpoint(tmp_path / "tiny-model")
        model = ["--model", tmp_path / "tiny-model"]
        baseline, stage = rows_of(tmp_path / "rows.csv", *model, *QUICK, *STAGE, "--pipeline")
        assert (baseline["model"], baseline["method"], stage["method"]) == ("tiny-model", "baseline", "toma-stage")
        assert stage["baseline_pipeline_s"] == baseline["pipeline_s"] != ""

    def test_a_folder_that_makes_clips(self, tmp_path):
        clips = ["--model", clip_folder(), *QUICK, *STAGE, "--pipeline", "--resolution", "64x48", "--frames", 9]
        rows = rows_of(tmp_path / "rows.csv", *clips)
        assert [row["method"] for row in rows] == ["baseline", "toma-stage"]
        assert all(row["pipeline_s"] and row["frames"] == "9" for row in rows)


def test_commit_is_that_of_the_package_whatever_the_folder(tmp_path, monkeypatch):
    here = head_of_package()
    monkeypatch.chdir(tmp_path)
    assert head_of_package() == here
    assert here
