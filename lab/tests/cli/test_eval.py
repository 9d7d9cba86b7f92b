"""The command `toma eval` on a tiny pipeline: its table, and what is left of a run that is killed."""

import csv
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image
from run_folders import finished_run
from tiny_text import PROMPTS, pipeline_folder, text_pipeline
from tiny_weights import inception_file, lpips_file
from toma_lab.cli import app
from toma_lab.evaluate import EvalFolder
from toma_lab.pipelines import checkpoints
from toma_lab.pipelines.generation import read_settings
from toma_lab.runner import Maker
from toma_lab.table import rows_of
from typer.testing import CliRunner

STEPS = 8
TIMES = ("seconds", "speedup", "gain", "date")
"""Columns in which two runs of the same command may differ."""
METRICS = "mse,psnr,ssim,lpips,fid,kid"
IMAGES = 2 * len(PROMPTS) * 5


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """What a user has: prompts, weights, real images."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "real").mkdir()
    for level in (60, 120, 180):
        Image.new("RGB", (64, 64), (level, 100, 255 - level)).save(folder / "real" / f"{level}.png")
    lpips_file(folder)
    inception_file(folder)
    return folder


@pytest.fixture(scope="session")
def command(given):
    """The arguments of `toma eval`. ToMeSD is among them because it is random."""
    return lambda output, *more: [
        *("eval", "--device", "cpu", "--model", str(pipeline_folder()), "--prompts", str(given / "prompts.txt")),
        *(
            "--seeds",
            "0,1",
            "--steps",
            str(STEPS),
            "--methods",
            "toma-stage:num_regions=4,tomesd,todo",
            "--ratios",
            "0.5,0.75",
        ),
        *("--metrics", METRICS, "--lpips-weights", str(given / "lpips.safetensors")),
        *("--inception-weights", str(given / "features.pt"), "--real-images", str(given / "real")),
        *("--output", str(output), "--commit", "abc", *more),  # that of the checkout may change while this runs
    ]


def invoke(arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


@pytest.fixture(scope="session")
def whole(command, tmp_path_factory):
    """A run that nothing happened to."""
    output = tmp_path_factory.mktemp("eval") / "whole"
    result = invoke(command(output))
    assert result.exit_code == 0, result.output
    return output, result.output


def measured(folder, column, item, **cells) -> None:
    folder.rows.add({"column_id": column.column_id, "item": item.name, **cells})


def lasting(output: Path) -> list[dict[str, str]]:
    """The table without what depends on the clock."""
    with (output / "table.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def run(command: list[str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment)  # pytest shows what it prints if a test fails


def wait_for(process: subprocess.Popen, output: Path, pattern: str, count: int) -> None:
    """Until there are so many files, however long a busy machine takes."""
    while len(list(output.glob(pattern))) < count:
        assert process.poll() is None, "it ended too early"
        time.sleep(0.01)


def wait_until_scored(process: subprocess.Popen, output: Path) -> None:
    """Until some pictures have a distance."""
    while "psnr" not in (output / "rows.jsonl").read_text():
        assert process.poll() is None, "it ended too early"
        time.sleep(0.01)


def times_of(output: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in output.glob("images/*/*.png")}


class TestTable:
    def test_one_row_a_variant(self, whole):
        rows = lasting(whole[0])
        assert [(row["method"], row["ratio"]) for row in rows] == [
            ("baseline", ""),
            ("noise floor", ""),
            ("toma-stage", "0.5"),
            ("toma-stage", "0.75"),
            ("tomesd", "0.5"),
            ("tomesd", "0.75"),
            ("todo", "0.75"),
        ]
        assert {row["images"] for row in rows} == {"6"}
        assert {row["resolution"] for row in rows} == {"64x64"}
        assert rows[2]["settings"] == '{"num_regions":4,"skip_blocks":[-1]}'

    def test_figures(self, whole):
        baseline, floor, half, more, *_ = EvalFolder(whole[0]).table()
        assert baseline["speedup"] == "1.0000"
        assert {baseline[name] for name in ("mse", "psnr", "ssim", "lpips")} == {""}
        assert baseline["fid"]
        assert float(floor["mse"]) < 0.5 < float(half["mse"]) < float(more["mse"])
        assert float(floor["lpips"]) < float(half["lpips"])
        assert half["sources"].startswith('{"fid":"features.pt ')
        assert '"lpips":"lpips.safetensors ' in half["sources"]

    def test_one_image_like_its_reference_does_not_make_psnr_infinite(self, tmp_path):
        folder = finished_run(tmp_path / "run")
        column, (first, second) = folder.plan.columns[2], folder.plan.items
        for item, psnr in ((first, 30.0), (second, math.inf)):
            measured(folder, column, item, psnr=psnr)
        # Half the squared error of the one that differs: 3 dB more.
        assert float(rows_of(folder, [column])[0]["psnr"]) == pytest.approx(33.01, abs=0.01)
        measured(folder, column, first, psnr=math.inf)
        assert rows_of(folder, [column])[0]["psnr"] == "inf"

    def test_images_contain_their_settings(self, whole):
        folder = EvalFolder(whole[0])
        column, item = folder.plan.columns[3], folder.plan.items[5]
        settings = read_settings(folder.picture(column, item))
        assert (settings["prompt"], settings["seed"], settings["steps"]) == (item.prompt, item.seed, STEPS)
        assert settings["column"]["own"]["merge"]["settings"]["ratio"] == 0.75
        assert settings["seconds"] == folder.item_row(column, item)["seconds"]

    def test_variants_take_turns(self, whole):
        """Item by item, and each item begins with another variant."""
        plan = EvalFolder(whole[0]).plan
        in_order = sorted(times_of(whole[0]).items(), key=lambda each: each[1])
        count = len(plan.columns)
        assert [(path.stem, path.parent.name) for path, _ in in_order] == [
            (item.name, plan.columns[(number + turn) % count].column_id)
            for number, item in enumerate(plan.items)
            for turn in range(count)
        ]

    def test_a_speed_up_is_the_median_of_paired_ratios(self, tmp_path):
        """A busy machine slows both times of an image: the medians of the times would give 1.0, the pairs give 2.0."""
        folder = finished_run(tmp_path / "run", seeds=(0, 1, 2))
        column = folder.plan.columns[2]
        for item, baseline, own in zip(folder.plan.items, (8.0, 80.0, 8.0), (4.0, 40.0, 8.0), strict=True):
            measured(folder, folder.plan.columns[0], item, seconds=baseline)
            measured(folder, column, item, seconds=own)
        rows = rows_of(folder, folder.plan.columns)
        assert (rows[0]["speedup"], rows[0]["seconds"]) == ("1.0000", "8")
        assert (rows[2]["speedup"], rows[2]["seconds"]) == ("2.0000", "8")

    def test_what_is_printed(self, whole):
        assert "Left out: todo cannot have ratio 0.5." in whole[1]
        for text in ("6 images of 64x64", "noise floor", "toma-stage 0.75, num_regions=4", "LPIPS ↓"):
            assert text in whole[1]


class TestAgain:
    def test_nothing_is_done_twice(self, whole, command):
        before, rows = times_of(whole[0]), EvalFolder(whole[0]).table()
        assert invoke(command(whole[0])).exit_code == 0
        assert times_of(whole[0]) == before
        assert EvalFolder(whole[0]).table() == rows

    def test_weights_may_come_later(self, command, tmp_path, given):
        arguments = command(tmp_path / "run")
        here = arguments.index("--lpips-weights") + 1
        few = ["--methods", "toma-stage", "--ratios", "0.5", "--seeds", "0", "--steps", "1", "--metrics", "psnr,lpips"]
        first = invoke([*arguments[:here], str(given / "gone"), *arguments[here + 1 :], *few])
        assert first.exit_code == 0, first.output
        assert "gone' cannot be read" in first.output
        without = EvalFolder(tmp_path / "run").table()[2]
        assert (without["lpips"], bool(without["psnr"])) == ("", True)
        assert invoke([*arguments, *few]).exit_code == 0
        table = EvalFolder(tmp_path / "run").table()[2]
        assert table["lpips"]
        assert table["psnr"] == without["psnr"]

    def test_a_metric_that_fails_at_the_end_is_reported_and_the_others_are_kept(self, command, tmp_path, given):
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "broken.png").write_bytes(b"no image")
        few = ["--methods", "toma-stage", "--ratios", "0.5", "--seeds", "0", "--steps", "1", "--metrics", "psnr,fid"]
        result = invoke([*command(tmp_path / "run"), *few, "--real-images", str(tmp_path / "real")])
        assert result.exit_code == 0, result.output
        assert "broken.png' cannot be read" in result.output
        row = EvalFolder(tmp_path / "run").table()[2]
        assert (row["fid"], bool(row["psnr"])) == ("", True)

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--paper", "table3"), "--paper table3 sets methods and ratios"),
            (("--protocol", "paper"), "--protocol paper sets the seeds"),
            (("--metrics", "vmaf"), "metric 'vmaf' is not known"),
            (("--size", "100"), "resolution '100' is not allowed"),
            (("--device", "gpu"), "device 'gpu' is not known"),
            (("--seeds", str(2**64)), "seed=18446744073709551616 is not allowed"),
            (("--guidance", "nan"), "--guidance nan is not allowed: it must be a number"),
        ],
    )
    def test_mistakes_are_named(self, more, message, command, tmp_path):
        result = invoke(command(tmp_path / "run", *more))
        assert result.exit_code == 2
        assert message in result.output
        assert not (tmp_path / "run").exists()

    def test_what_had_no_memory_is_tried_again_by_the_same_command(self, command, tmp_path, monkeypatch):
        few = ["--methods", "steps:1,tomesd", "--ratios", "0.5", "--seeds", "0", "--steps", "2", "--metrics", "psnr"]
        make = Maker.make

        def full(maker, column, requests):
            if column.name == "tomesd":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return make(maker, column, requests)

        with monkeypatch.context() as patch:
            patch.setattr(Maker, "make", full)
            result = invoke(command(tmp_path / "run", *few))
        assert result.exit_code == 1
        assert "Failed: tomesd 0.5: OutOfMemoryError: CUDA out of memory" in result.output
        assert "3 images failed; the same command tries them again." in result.output
        before = times_of(tmp_path / "run")
        assert [bool(row["psnr"]) for row in EvalFolder(tmp_path / "run").table()] == [False, True, True, False]
        assert invoke(command(tmp_path / "run", *few)).exit_code == 0
        assert before.items() <= times_of(tmp_path / "run").items()
        assert EvalFolder(tmp_path / "run").table()[3]["psnr"]

    def test_a_bug_ends_the_command(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr(Maker, "make", lambda *_: 1 / 0)
        assert isinstance(invoke(command(tmp_path / "run")).exception, ZeroDivisionError)

    def test_ratios_that_nobody_asked_for_are_not_spoken_of(self, command, tmp_path):
        arguments = command(tmp_path / "run", "--methods", "todo,fast", "--seeds", "0", "--metrics", "mse")
        here = arguments.index("--ratios")
        result = invoke([*arguments[:here], *arguments[here + 2 :]])
        assert result.exit_code == 0, result.output
        assert "Left out" not in result.output


SHORTCUTS = (
    "--methods",
    "steps:6,tomesd,toma-stage:num_regions=4+steps:6",
    "--ratios",
    "0.5",
    "--metrics",
    "psnr,lpips",
)


@pytest.fixture(scope="module")
def batched(command, tmp_path_factory):
    """Fewer steps with and without merging, four images at once."""
    output = tmp_path_factory.mktemp("batched") / "run"
    result = invoke(command(output, *SHORTCUTS, "--batch", "4"))
    assert result.exit_code == 0, result.output
    return output


class TestShortcutsAndBatches:
    def test_a_batch_gives_the_same_figures_up_to_rounding(self, batched, command, tmp_path):
        assert invoke(command(tmp_path / "run", *SHORTCUTS)).exit_code == 0
        together, alone = EvalFolder(batched).table(), EvalFolder(tmp_path / "run").table()
        assert [row["method"] for row in together] == ["baseline", "noise floor", "steps", "tomesd", "toma-stage+steps"]
        for one, other in zip(together, alone, strict=True):
            if one["method"] in ("steps", "toma-stage+steps"):  # ToMeSD draws its random numbers once for a batch
                assert float(one["lpips"]) == pytest.approx(float(other["lpips"]), rel=0.05)
                assert float(one["psnr"]) == pytest.approx(float(other["psnr"]), rel=0.01)

    def test_the_gain_is_measured_unless_a_large_model_is_named(self, batched, command, tmp_path):
        for row in EvalFolder(batched).table():
            assert (row["gain"], row["gain_source"]) == (row["speedup"], "measured")
        methods = "steps:4,toma-stage,toma-late:region_tokens=64"
        few = ("--methods", methods, "--ratios", "0.5", "--seeds", "0", "--metrics", "psnr")
        result = invoke(command(tmp_path / "run", *few, "--time-of", "sdxl"))
        assert result.exit_code == 0, result.output
        baseline, floor, fewer, fast, balanced = EvalFolder(tmp_path / "run").table()
        assert (baseline["gain"], floor["gain"], fewer["gain"]) == ("1.0000", "", "2.0000")
        assert float(fast["gain"]) == pytest.approx(1.39, abs=0.02)
        assert float(balanced["gain"]) == pytest.approx(1.16, abs=0.02)
        assert {row["gain_source"] for row in (baseline, fewer, fast, balanced)} == {"sdxl"}

    def test_skipped_steps_are_counted(self, command, tmp_path):
        pytest.importorskip("DeepCache")
        few = ("--methods", "deepcache:interval=2", "--seeds", "0", "--metrics", "psnr", "--batch", "3")
        result = invoke(command(tmp_path / "run", *few, "--time-of", "sdxl"))
        assert result.exit_code == 0, result.output
        cached = EvalFolder(tmp_path / "run").table()[2]
        assert (cached["method"], cached["skipped"]) == ("deepcache", "0.5")

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--methods", "steps:8"), "'steps:8' is not fewer than the 8 steps of the run"),
            (("--methods", "magcache"), "'magcache' cannot be used with a UNet2DConditionModel"),
            (("--batch", "0"), "batch=0 is not allowed"),
            (("--time-of", "sd9"), "there are no measured steps of 'sd9'"),
        ],
    )
    def test_mistakes_are_named(self, more, message, command, tmp_path):
        result = invoke(command(tmp_path / "run", *more))
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        ("bundled", ("--methods", "todo"), (20, None)),
        ("bundled-4step", ("--methods", "todo"), (4, 1.0)),
        ("bundled-4step", ("--paper", "table6"), (4, 1.0)),
        ("bundled-4step", ("--methods", "todo", "--steps", "2", "--guidance", "3"), (2, 3.0)),
    ],
)
def test_the_defaults_are_those_of_the_model(model, more, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_: text_pipeline())
    prompts, output = tmp_path / "prompts.txt", tmp_path / "run"
    prompts.write_text(PROMPTS[0])
    result = invoke(
        ["eval", "--model", model, "--prompts", str(prompts), "--metrics", "mse", "--output", str(output), *more]
    )
    assert result.exit_code == 0, result.output
    plan = EvalFolder(output).plan
    assert (plan.model, plan.steps, plan.guidance) == (model, *expected)


def test_a_table_of_the_paper(command, tmp_path):
    arguments = [*command(tmp_path / "run")]
    for option in ("--methods", "--ratios"):
        here = arguments.index(option)
        del arguments[here : here + 2]
    result = invoke([*arguments, "--paper", "table6", "--steps", "1", "--seeds", "0", "--metrics", "mse"])
    assert result.exit_code == 0, result.output
    folder = EvalFolder(tmp_path / "run")
    assert folder.plan.paper == "table6"
    assert ["transpose" in folder.table()[2]["settings"], "pseudo-inverse" in folder.table()[3]["settings"]] == [
        True
    ] * 2


@pytest.mark.slow
def test_killed_runs_are_finished_with_the_same_table(whole, command, tmp_path):
    """One process is killed while it generates, then one of two while they score; two processes finish."""
    output = tmp_path / "run"
    alone = run([sys.executable, "-m", "toma_lab.cli", *command(output)])
    wait_for(alone, output, "images/*/*.png", IMAGES // 3)
    before = times_of(output)
    alone.send_signal(signal.SIGKILL)
    alone.wait()
    assert len(before) < IMAGES
    launch = [
        # Accelerate's own --cpu starts one process only, unless MPI starts it; --device cpu among ours gives gloo.
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *(
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "0",
            "--monitor_interval",
            "0.2",
        ),
        *("-m", "toma_lab.cli", *command(output)),
    ]
    launcher = run(launch)
    wait_until_scored(launcher, output)
    workers = [child for child in psutil.Process(launcher.pid).children() if "LOCAL_RANK" in child.environ()]
    assert {worker.environ()["LOCAL_RANK"] for worker in workers} == {"0", "1"}
    next(worker for worker in workers if worker.environ()["LOCAL_RANK"] == "1").kill()
    assert launcher.wait() != 0
    assert not (output / "table.csv").exists()
    generated = times_of(output)
    assert before.items() <= generated.items()  # existing images were kept
    assert run(launch).wait() == 0
    assert times_of(output) == generated
    assert lasting(output) == lasting(whole[0])
