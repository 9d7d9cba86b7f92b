"""The command `toma learn`, on a tiny pipeline."""

from __future__ import annotations

import json

import pytest
from tiny_text import PROMPTS, pipeline_folder
from toma_lab.cli import app
from typer.testing import CliRunner

from toma_diffusion.skip.learned import Learned

STEPS = 8


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    prompts = tmp_path_factory.mktemp("given") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    return lambda output, *more: [
        *("learn", "--device", "cpu", "--model", str(pipeline_folder()), "--prompts", str(prompts), "--guidance", "4"),
        *("--steps", str(STEPS), "--images", "4", "--output", str(output), *more),
    ]


def invoke(arguments):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_what_was_learned_is_shown_and_written(command, tmp_path):
    output = tmp_path / "learned.json"
    done = invoke(command(output))
    if done.exit_code == 2:  # a network of random weights may be predicted as well with nothing learned
        assert "not closer on the last generation" in done.stderr
        assert not output.exists()
        return
    assert done.exit_code == 0, done.output
    learned = Learned.read(output)
    assert (learned.num_steps, learned.guidance) == (STEPS, 4.0)
    assert f"Learned for {STEPS} steps" in done.output
    assert f"learned={str(output)!r}" in done.output.replace("\n", "")
    assert not list(tmp_path.glob(".*"))  # what a killed command would go on from
    used = ["generate", PROMPTS[0], "--model", str(pipeline_folder()), "--steps", str(STEPS), "--guidance", "4"]
    preset = f"fast:computed={learned.counts[0]};learned={output}"
    made = invoke([*used, "--preset", preset, "--output", str(tmp_path / "image.png"), "--device", "cpu"])
    assert made.exit_code == 0, made.output


def test_work_of_other_settings_is_not_mixed_in(command, tmp_path):
    output = tmp_path / "learned.json"
    folder = tmp_path / f".{output.name}.learning"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"model": "another"}))
    done = invoke(command(output))
    assert done.exit_code == 2
    assert "belongs to another learning, with model='another'" in done.stderr
    assert "--fresh" in done.stderr
    assert invoke(command(output, "--fresh", "--images", "3")).exit_code in (0, 2)
    assert not folder.exists() or "another" not in (folder / "settings.json").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--images", "2"), "--images 2 are too few"),
        (("--minutes", "-1"), "--minutes -1.0 is not allowed"),
        (("--minutes", "nan"), "--minutes nan is not allowed"),
        (("--computed", "twelve"), "--computed 'twelve' is not a list of numbers"),
        (("--computed", "0"), "--computed '0' has a number below 1"),
        (("--prompts", "missing.txt"), "there is no such file"),
    ],
)
def test_wrong_options_say_what_to_do(command, tmp_path, more, message):
    done = invoke(command(tmp_path / "learned.json", *more))
    assert done.exit_code == 2
    assert message in done.stderr
