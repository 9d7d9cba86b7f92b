"""The command `toma tune` on a tiny pipeline: its answer, its page, and what is left of a search that is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from test_page import Elements
from tiny_text import PROMPTS, pipeline_folder, text_pipeline
from tiny_weights import lpips_file
from toma_lab.cli import app
from toma_lab.pipelines.generation import ImageRequest, generate_image, read_settings
from toma_lab.runner import Maker
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.outcome import Outcome
from typer.testing import CliRunner

from toma_diffusion import speed_up
from toma_diffusion.tuned import Tuned

STEPS = 4
SPEEDS = {"3 steps": 1.3, "2 steps": 2.0, "toma-stage 0.5, num_regions=4": 1.5}
METHODS = "steps:75%,toma-stage:num_regions=4@0.5,steps:50%,first-block-cache:threshold=0.1"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    prompts = tmp_path_factory.mktemp("given") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return lambda output, *more: [
        *("tune", "--device", "cpu", "--model", str(pipeline_folder()), "--prompts", str(prompts)),
        *("--steps", str(STEPS), "--methods", METHODS, "--output", str(output), "--commit", "abc", *more),
    ]


def invoke(arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def set_speeds(folder: TuneFolder, speeds: dict[str, float]) -> None:
    """Replace the times, which depend on the machine: speed-ups by the titles of candidates."""
    for result in Outcome.read(folder).results:
        for item in (*folder.plan.items, *folder.plan.final_items):
            if folder.item_row(result.column, item):
                cells = {"seconds": 1.0, "baseline_seconds": speeds[result.column.title]}
                folder.add(result.column, item, cells)


@pytest.fixture(scope="module")
def first(command, tmp_path_factory):
    """A search that nothing happened to, with the times that it took."""
    output = tmp_path_factory.mktemp("tune") / "first"
    result = invoke(command(output, "--max-lpips", "0.9"))
    assert result.exit_code in (0, 1), result.output
    return output, result.output


@pytest.fixture(scope="module")
def whole(first, command, tmp_path_factory):
    """The same, with times as a large model would have them."""
    output = tmp_path_factory.mktemp("tune") / "whole"
    shutil.copytree(first[0], output)
    set_speeds(TuneFolder(output), SPEEDS)
    result = invoke(command(output, "--min-psnr", "5"))
    assert result.exit_code == 0, result.output
    return output, result.output


def lines(output: Path) -> list[str]:
    """What was measured, in order."""
    return (output / "rows.jsonl").read_text().splitlines()


class TestAnswer:
    def test_it_is_printed_and_written(self, whole):
        output, printed = whole
        assert "The answer to “the fastest with PSNR ≥ 5 dB” is 2 steps: 2.00× as fast" in printed
        tuned = Tuned.read(output / "tuned.json")
        assert (tuned.model_class, tuned.num_steps, tuned.steps_left) == ("UNet2DConditionModel", STEPS, 2)
        assert (tuned.measured["speed_up"], tuned.measured["lpips"], tuned.measured["prompts"]) == (2.0, None, 4)
        assert tuned.measured["versions"]["commit"] == "abc"

    def test_finalists_have_images_of_their_own(self, whole):
        folder = TuneFolder(whole[0])
        searched, final = (
            {(item.prompt, item.seed) for item in items} for items in (folder.plan.items, folder.plan.final_items)
        )
        assert len(searched) == len(final) == 4
        assert not searched & final
        for result in Outcome.read(folder).finalists:
            assert result.figures.images == 4
            assert all(folder.picture(result.column, item).exists() for item in folder.plan.final_items)

    def test_another_goal_uses_what_was_measured(self, whole, command, tmp_path):
        shutil.copytree(whole[0], tmp_path / "run")
        before = lines(tmp_path / "run")
        result = invoke(command(tmp_path / "run", "--speed-up", "1.4"))
        assert result.exit_code == 0, result.output
        assert lines(tmp_path / "run")[: len(before)] == before
        assert "The answer to “the nearest at 1.4× the speed” is " in result.output

    def test_a_goal_that_is_not_reached(self, whole, command, tmp_path):
        shutil.copytree(whole[0], tmp_path / "run")
        result = invoke(command(tmp_path / "run", "--min-psnr", "200"))
        assert result.exit_code == 1
        assert (
            "No candidate reached the goal, the fastest with PSNR ≥ 200 dB. The answer is the model as it is"
            in result.output
        )
        assert Tuned.read(tmp_path / "run" / "tuned.json").does_nothing
        assert "The answer is the model as it is" in (tmp_path / "run" / "tune.html").read_text()

    def test_a_candidate_that_fails_is_noted_and_tried_again_by_the_same_command(
        self, whole, command, tmp_path, monkeypatch
    ):
        arguments = command(tmp_path / "run", "--min-psnr", "5", "--methods", "steps:75%,steps:50%")
        make = Maker.make

        def full(maker, column, requests):
            if column.title == "2 steps":
                raise torch.OutOfMemoryError("too large")
            return make(maker, column, requests)

        with monkeypatch.context() as patch:
            patch.setattr(Maker, "make", full)
            assert invoke(arguments).exit_code in (0, 1)
        assert "failed: OutOfMemoryError: too large" in (tmp_path / "run" / "tune.html").read_text()
        assert invoke(arguments).exit_code in (0, 1)
        assert [each.failure for each in Outcome.read(TuneFolder(tmp_path / "run")).results] == ["", ""]


class TestUse:
    def test_toma_generate_takes_it(self, whole, tmp_path):
        model = ["--model", str(pipeline_folder()), "--device", "cpu", "--output", str(tmp_path / "a.png")]
        tuned = ["--config", str(whole[0] / "tuned.json")]
        result = CliRunner().invoke(app, ["generate", "a red apple", *model, *tuned])
        assert result.exit_code == 0, result.output
        assert f"2 steps are taken in place of {STEPS}." in result.output
        assert read_settings(tmp_path / "a.png")["steps"] == 2
        for more, message in (
            (["--steps", "9"], "was found for 4 steps, not for 9"),
            (["--preset", "fast"], "leave --preset fast out"),
        ):
            refused = CliRunner().invoke(app, ["generate", "a red apple", *model, *tuned, *more])
            assert (refused.exit_code, message in refused.output) == (2, True)

    def test_merging_is_applied_by_both(self, whole, command, tmp_path):
        shutil.copytree(whole[0], tmp_path / "run")
        set_speeds(TuneFolder(tmp_path / "run"), {"3 steps": 1.3, "2 steps": 1.1, "toma-stage 0.5, num_regions=4": 3.0})
        assert invoke(command(tmp_path / "run", "--min-psnr", "5")).exit_code == 0
        file, pipe = tmp_path / "run" / "tuned.json", text_pipeline()
        with speed_up(pipe, file):
            expected = generate_image(pipe, ImageRequest("a red apple", steps=STEPS))
        arguments = [
            "--model",
            str(pipeline_folder()),
            "--device",
            "cpu",
            "--compare",
            "--output",
            str(tmp_path / "a.png"),
        ]
        result = CliRunner().invoke(app, ["generate", "a red apple", *arguments, "--config", str(file)])
        assert result.exit_code == 0, result.output
        assert "50% of the tokens are removed by merging (ToMA), around every run of blocks." in result.output
        assert Image.open(tmp_path / "a.png").crop((80, 8, 144, 72)).tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def text(whole):
    return (whole[0] / "tune.html").read_text(encoding="utf-8")


class TestPage:
    def test_it_is_well_formed_and_needs_nothing_else(self, text):
        elements = Elements(text)
        assert elements.open == []
        ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert {each["href"].removeprefix("#") for each in elements.all("a")} <= set(ids)
        assert all(each["src"].startswith("data:") for each in elements.all("img") if "src" in each)
        assert all("src" not in each for each in elements.all("script"))

    def test_it_has_all_parts(self, text):
        for part in (
            "The answer to “the fastest with PSNR ≥ 5 dB” is 2 steps",
            f"2 steps are taken in place of {STEPS}.",
            "image = pipe(prompt, num_inference_steps=2).images[0]",
            'id="cut" type="range"',
            "The front: ",
            "cannot be used with a UNet2DConditionModel",
        ):
            assert part in text


class TestLpips:
    def test_without_weights_psnr_takes_its_place(self, first):
        assert "Note: LPIPS is not measured (lpips: give a .safetensors file" in first[1]
        assert "In place of LPIPS ≤ 0.9 the limit is PSNR ≥ 10.7 dB" in first[1]
        assert TuneFolder(first[0]).plan.lpips == ""

    def test_with_weights_both_are_measured(self, command, tmp_path):
        weights = ("--lpips-weights", str(lpips_file(tmp_path)))
        result = invoke(command(tmp_path / "run", "--max-lpips", "0.5", "--methods", "steps:50%", *weights))
        assert result.exit_code in (0, 1), result.output
        folder = TuneFolder(tmp_path / "run")
        figures = Outcome.read(folder).results[0].figures
        assert figures.lpips > 0
        assert "LPIPS ↓" in (tmp_path / "run" / "tune.html").read_text()
        later = invoke(command(tmp_path / "run", "--max-lpips", "0.5", "--methods", "steps:50%"))
        assert later.exit_code == 2
        assert "Its lpips is 'lpips.safetensors " in later.output


class TestAgain:
    def test_nothing_is_measured_twice(self, whole, command):
        before, answer = lines(whole[0]), (whole[0] / "tuned.json").read_text()
        assert invoke(command(whole[0], "--min-psnr", "5")).exit_code == 0
        assert lines(whole[0]) == before
        assert (whole[0] / "tuned.json").read_text() == answer

    @pytest.mark.parametrize("lost", [("answer.json", "tuned.json", "tune.html"), ("candidates.json", "tuned.json")])
    def test_lost_files_are_made_again_and_are_the_same(self, whole, command, tmp_path, lost):
        shutil.copytree(whole[0], tmp_path / "run")
        for name in lost:
            (tmp_path / "run" / name).unlink()
        assert invoke(command(tmp_path / "run", "--min-psnr", "5")).exit_code == 0
        for name in lost:
            assert (tmp_path / "run" / name).read_text() == (whole[0] / name).read_text()

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (("--steps", "5"), "Its steps is 4, this command has 5"),
            (("--budget", "tiny"), "budget='tiny' is not known"),
            (("--compile", "fully"), "--compile 'fully' is not known: use one of none, blocks"),
            (("--quality", "high", "--speed-up", "2"), "exclude each other"),
            (("--guidance", "inf"), "--guidance inf is not allowed"),
        ],
    )
    def test_mistakes_are_named(self, whole, command, more, message):
        result = invoke(command(whole[0], *more))
        assert (result.exit_code, message in result.output) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_killed_and_resumed(whole, command, tmp_path, count):
    """No measurement is made again, every distance is that of an undisturbed search, and so is the answer."""
    output = tmp_path / "run"
    arguments = command(output, "--min-psnr", "5")
    kill_when(arguments, output, count)
    before = lines(output)
    assert invoke(arguments).exit_code in (0, 1)
    assert lines(output)[: len(before) - 1] == before[:-1]  # the last line may have been cut off
    resumed, undisturbed = TuneFolder(output), TuneFolder(whole[0])
    candidates = [json.loads(folder.candidates_path.read_text()) for folder in (resumed, undisturbed)]
    assert candidates[0] == candidates[1]
    for result in Outcome.read(resumed).results:
        for item in resumed.plan.items:
            one, other = (folder.item_row(result.column, item) for folder in (resumed, undisturbed))
            if one and other:
                assert one["psnr"] == pytest.approx(other["psnr"], rel=1e-4)
    set_speeds(resumed, SPEEDS)
    assert invoke(arguments).exit_code == 0
    one, other = (Tuned.read(folder.tuned_path) for folder in (resumed, undisturbed))
    assert (one.shortcuts, one.measured["speed_up"]) == (other.shortcuts, 2.0)


def kill_when(arguments: list[str], output: Path, count: int) -> None:
    """Start the command and kill it as soon as so much was measured."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "toma_lab.cli", *arguments], env=environment, **quiet)
    while not (output / "rows.jsonl").exists() or len(lines(output)) < count:
        assert process.poll() is None, "it ended too early"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
