"""The command `toma bench`, on small models."""

import csv
import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from checkpoint import save_checkpoint
from toma_lab.bench.models import build
from toma_lab.bench.published import MODELS
from toma_lab.bench.records import Records, claimed
from toma_lab.bench.runner import BASELINE_CELL, Runner
from toma_lab.bench.scenario import Scenario, compare
from toma_lab.bench.timing import Timing
from toma_lab.bench.turns import Turns
from toma_lab.cli import app
from toma_lab.experiments.cells import MethodSpec
from toma_lab.experiments.facts import Facts, gather_facts
from toma_lab.experiments.parsing import Resolution
from typer.testing import CliRunner

from toma_diffusion import Action, MergePlan
from toma_diffusion.families import find_family

QUICK = ["--device", "cpu", "--size", "small", "--resolution", "128", "--steps", "3", "--repeats", "2"]
SD15 = ["--model", "sd15", *QUICK, "--methods", "toma,toma-stage:select_every=2", "--ratios", "0.5", "--modes", "eager"]


def invoke(*arguments: str | Path):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200"})


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of the command; tests that write take a copy of its file."""
    path = tmp_path_factory.mktemp("bench") / "rows.csv"
    updates = []
    update = MergePlan.update

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
        with claimed(path):
            result = invoke(*SD15, "--output", path, "--fresh")
        assert result.exit_code == 2
        assert "another benchmark is writing" in result.output
        assert not path.exists()

    @pytest.mark.parametrize("option", ["--output", "--take-turns"])
    def test_a_folder_is_no_file(self, tmp_path, option):
        result = invoke(*SD15, "--output", tmp_path / "rows.csv", option, tmp_path)
        assert result.exit_code == 2
        assert "is a folder: give the name of a file" in result.output

    def test_rows_and_turns_need_two_files(self, tmp_path):
        """The rows replace their file, and with it the lock."""
        path = tmp_path / "rows.csv"
        result = invoke(*SD15, "--output", path, "--take-turns", path)
        assert result.exit_code == 2
        assert "give each a file of its own" in result.output


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
        assert json.loads(rows[-1]["settings"]) == {"reweigh_every": 1, "select_every": 2, "skip_blocks": [-1]}

    def test_ratios_of_times_are_those_of_the_same_run(self, finished):
        rows = read(finished[0])
        baseline, bound, floor, toma = rows[:4]
        for row in rows:
            assert row["baseline_ms"] == baseline["step_ms"]
            assert float(row["speedup"]) == pytest.approx(float(row["baseline_ms"]) / float(row["step_ms"]), rel=1e-3)
            assert float(row["step_ms_p20"]) <= float(row["step_ms"]) <= float(row["step_ms_p80"])
        assert (toma["lower_bound_ms"], toma["floor_ms"]) == (bound["step_ms"], floor["step_ms"])
        over = float(toma["step_ms"]) / float(bound["step_ms"]) - 1
        assert float(toma["over_lower_bound"]) == pytest.approx(over, abs=1e-3)
        assert baseline["lower_bound_ms"] == bound["floor_ms"] == ""

    def test_the_schedule_really_happened_in_every_run(self, finished):
        """Warm-up and two repeats: three runs of three steps. Bounds never select."""
        _, _, updates = finished
        for scope, selections in (("module", 1), ("stage", 2)):
            plans = {plan for each, plan, _ in updates if each == scope}
            selected = [plan for each, plan, action in updates if each == scope and action is Action.SELECT]
            assert plans
            assert {selected.count(plan) for plan in set(selected)} == {3 * selections}

    def test_the_drift_of_the_baseline_is_noted(self, finished):
        drifts = {row["baseline_drift"] for row in read(finished[0])}
        assert len(drifts) == 1
        assert float(drifts.pop()) > -1

    def test_table(self, finished):
        _, output, _ = finished
        for text in (
            "sd15-small, 128x128, batch 2, float32, 3 steps, eager",
            "1.00×",
            "lower-bound",
            "toma-stage",
            "rows.csv",
        ):
            assert text in output


@pytest.mark.slow
class TestResuming:
    def test_nothing_is_measured_twice(self, copied):
        before = copied.read_bytes()
        result = invoke(*SD15, "--output", copied)
        assert result.exit_code == 0
        assert "Nothing to do" in result.output
        assert copied.read_bytes() == before

    def test_a_missing_method_comes_with_its_baseline_and_bounds(self, copied):
        rows = read(copied)
        records = Records(copied)
        records.rows = [row for row in records.rows if row["method"] != "toma-stage"]
        records._write()
        result = invoke(*SD15, "--output", copied)
        assert result.exit_code == 0, result.output
        after = read(copied)
        assert after[:6] == rows[:6]
        new = after[6:]
        assert [row["method"] for row in new] == ["baseline", "lower-bound", "floor", "toma-stage"]
        assert {row["baseline_ms"] for row in new} == {new[0]["step_ms"]}
        assert new[-1]["floor_ms"] == new[2]["step_ms"]

    def test_rows_of_other_code_or_machines_do_not_count(self, copied):
        denoiser = build("sd15", small=True, device=torch.device("cpu"))
        methods = tuple(MethodSpec.parse(text) for text in ("toma", "toma-stage:select_every=2"))
        scenario = Scenario(
            methods, (0.5,), (), (Resolution(128, 128),), (2,), ("eager",), "block", 3, 2, ("floor",), False, None
        )
        comparisons = compare(denoiser.model, methods, (0.5,), (), bounds=("lower-bound", "floor"))
        facts = gather_facts(torch.device("cpu"))

        def to_do(facts: Facts, **changes) -> int:
            changed = Scenario(**vars(scenario) | changes)
            runner = Runner(changed, denoiser, comparisons, Records(copied), facts, None, None, Turns())
            return len(runner.task(runner.groups[0]).cells)

        assert to_do(facts) == 0
        for field in ("gpu", "torch", "diffusers", "triton", "toma_diffusion", "commit"):
            assert to_do(Facts(**vars(facts) | {field: "another"})) == 7
        assert to_do(facts, steps=4) == to_do(facts, batches=(1,)) == 7
        runner = Runner(scenario, denoiser, comparisons, Records(copied), facts, lambda: None, None, Turns())
        assert len(runner.task(runner.groups[0]).cells) == 7  # those rows have no time of the pipeline
        assert runner.task(runner.groups[0]).cells[0] is BASELINE_CELL

    def test_fresh_starts_over(self, copied):
        result = invoke(
            *SD15[:-6],
            "--methods",
            "toma-stage",
            "--ratios",
            "0.5",
            "--bounds",
            "none",
            "--output",
            copied,
            "--fresh",
            "--commit",
            "abc",
        )
        assert result.exit_code == 0, result.output
        assert [(row["method"], row["commit"]) for row in read(copied)] == [("baseline", "abc"), ("toma-stage", "abc")]


class TestDrift:
    def test_a_baseline_that_changes_is_told(self, tmp_path, monkeypatch):
        """The first baseline takes 40 ms a step, the one at the end 10 ms: as happened on a busy machine."""
        times = iter([40.0, 5.0, 10.0])
        monkeypatch.setattr(
            "toma_lab.bench.measure.time_runs", lambda run, repeats, steps, device: Timing.of([next(times)])
        )
        path = tmp_path / "rows.csv"
        few = ["--methods", "toma-stage:num_regions=4", "--ratios", "0.5", "--bounds", "none"]
        result = invoke("--model", "sd35", *QUICK, *few, "--output", path)
        assert result.exit_code == 0, result.output
        assert "the baseline took 40 ms at the beginning and 10 ms at the end" in result.output
        assert [(row["method"], float(row["baseline_drift"])) for row in read(path)] == [
            ("baseline", -0.75),
            ("toma-stage", -0.75),
        ]


class TestFailures:
    def test_one_cell_fails_and_the_others_go_on(self, tmp_path, monkeypatch):
        merge = MergePlan.merge

        def out_of_memory(plan, tokens):
            if plan.config.scope == "block":
                raise torch.OutOfMemoryError("tried to allocate\nmore than there is")
            return merge(plan, tokens)

        monkeypatch.setattr(MergePlan, "merge", out_of_memory)
        path = tmp_path / "rows.csv"
        result = invoke(
            "--model",
            "sd35",
            *QUICK,
            "--methods",
            "toma-once,toma-stage:num_regions=16",
            "--ratios",
            "0.5",
            "--bounds",
            "none",
            "--output",
            path,
        )
        assert result.exit_code == 1
        assert "Failed: toma-once, block, ratio 0.5" in result.output
        assert "OutOfMemoryError: tried to allocate" in result.output
        assert [row["method"] for row in read(path)] == ["baseline", "toma-stage"]

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
            (["--scopes", "net"], "scope='net'"),
            (["--resolution", "100"], "'100'"),
            (["--batch", "two"], "'two'"),
            (["--modes", "fastest"], "'fastest'"),
            (["--modes", "graph"], "'graph' needs a GPU"),
            (["--compile", "some"], "'some'"),
            (["--dtype", "int8"], "'int8'"),
            (["--device", "tpu"], "'tpu'"),
            (["--cache", "0.1"], "--cache 0.1"),
            (["--model", "z-image", "--pipeline"], "the decoder of model 'z-image'"),
        ],
    )
    def test_wrong_input_is_quoted(self, arguments, message, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        result = invoke("--model", "sd15", *QUICK, *arguments)
        assert result.exit_code == 2
        assert message in result.output
        assert list(tmp_path.iterdir()) == []


MEASURED_ELSEWHERE = ("sdxl", "sd15", "flux", "sd35", "flux2-klein", "flux2-klein-4b")
"""In other tests here; klein is `flux2` but for its size."""
TODAY = [
    name
    for name, published in MODELS.items()
    if name not in MEASURED_ELSEWHERE and hasattr(diffusers, published.class_name)
]


@pytest.mark.parametrize("model", TODAY)
def test_every_model_known_by_name_is_measured(model, tmp_path):
    """Merging, skipped steps, and both: of five steps some are skipped."""
    denoiser = build(model, small=True, device=torch.device("cpu")).model
    if find_family(denoiser) is None:
        pytest.skip(f"there is no adapter for {type(denoiser).__name__}")
    path = tmp_path / "rows.csv"
    methods = [
        "--methods",
        "toma-stage:num_regions=4,fast:computed=3,toma-late:computed=4;ratio=0.5;num_regions=4;min_tokens=0",
        "--ratios",
        "0.5",
        "--bounds",
        "none",
    ]
    few = ["--resolution", "128", "--steps", "5", "--repeats", "1", *methods]
    result = invoke("--model", model, "--device", "cpu", "--size", "small", *few, "--output", path)
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.output.replace("Warning: the baseline took", "")  # times are those of a busy machine
    rows = read(path)
    assert [row["method"] for row in rows] == ["baseline", "toma-stage", "fast", "toma-late"]
    assert {(row["model"], row["batch"]) for row in rows} == {(f"{model}-small", str(MODELS[model].batch))}


class TestMore:
    @pytest.mark.parametrize("model", ["sdxl", "flux", "sd35"])
    def test_whole_pipeline(self, model, tmp_path):
        path = tmp_path / "rows.csv"
        few = [
            "--steps",
            "2",
            "--repeats",
            "1",
            "--methods",
            "toma-stage:num_regions=4",
            "--ratios",
            "0.5",
            "--bounds",
            "none",
        ]
        result = invoke("--model", model, *QUICK, *few, "--pipeline", "--output", path)
        assert result.exit_code == 0, result.output
        baseline, fast = read(path)
        assert fast["baseline_pipeline_s"] == baseline["pipeline_s"]
        assert float(fast["pipeline_s"]) > 0

    def test_cache(self, tmp_path):
        path = tmp_path / "rows.csv"
        few = ["--methods", "toma-stage:num_regions=4", "--ratios", "0.5", "--bounds", "none", "--cache", "1000"]
        result = invoke("--model", "flux", *QUICK, *few, "--output", path)
        assert result.exit_code == 0, result.output
        assert [(row["cache"], float(row["cache_hits"])) for row in read(path)] == [
            ("1000", pytest.approx(2 / 3, abs=1e-3))
        ] * 2

    def test_a_checkpoint_of_ones_own(self, tmp_path):
        save_checkpoint(tmp_path / "tiny-model")
        path = tmp_path / "rows.csv"
        few = ["--methods", "toma-stage:num_regions=4", "--ratios", "0.5", "--bounds", "none", "--pipeline"]
        result = invoke("--model", tmp_path / "tiny-model", *QUICK, *few, "--output", path)
        assert result.exit_code == 0, result.output
        baseline, fast = read(path)
        assert (baseline["model"], baseline["method"], fast["method"]) == ("tiny-model", "baseline", "toma-stage")
        assert fast["baseline_pipeline_s"] == baseline["pipeline_s"] != ""
