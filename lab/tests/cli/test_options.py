"""Which errors of a command are the user's, and which keep their traceback."""

import sys
import traceback

import pytest
import typer
from tiny_text import pipeline_folder
from toma_lab.cli import app
from toma_lab.cli.options import report_user_errors
from toma_lab.metrics.pixels import Psnr
from typer.testing import CliRunner

from toma_diffusion import UsageError


def run(error: Exception):
    command = typer.Typer()

    @command.command()
    @report_user_errors("metrics")
    def fail(number: int = 1) -> None:
        raise error

    return CliRunner().invoke(command, ["--number", "2"])


def invoke_eval(folder):
    (folder / "prompts.txt").write_text("a red apple")
    return CliRunner().invoke(
        app,
        [
            *("eval", "--device", "cpu", "--model", str(pipeline_folder()), "--prompts", str(folder / "prompts.txt")),
            *("--methods", "todo", "--ratios", "0.75", "--steps", "1", "--metrics", "psnr"),
            *("--output", str(folder / "run")),
        ],
    )


def test_a_user_s_mistake_is_one_line():
    result = run(UsageError("ratio=2 is not allowed."))
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: ratio=2 is not allowed.\n")


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("disk full"), ImportError("broken"), KeyError("x")])
def test_everything_else_keeps_its_traceback(error):
    result = run(error)
    assert result.exit_code == 1
    assert result.exception is error
    assert "Error: " not in result.output


def test_a_module_of_an_extra_comes_with_the_command_to_install_it():
    result = run(ModuleNotFoundError("No module named 'torchmetrics.image'", name="torchmetrics.image"))
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: torchmetrics.image is not installed. Install it: pip install 'toma-diffusion[metrics]'.\n"
    )


def test_a_missing_module_of_our_own_is_a_bug():
    error = ModuleNotFoundError("No module named 'toma_diffusion.x'", name="toma_diffusion.x")
    assert run(error).exception is error


def test_an_error_deep_inside_a_run_shows_where_it_was(tmp_path, monkeypatch):
    def fail(self, images, references):
        raise ValueError("deep inside")

    monkeypatch.setattr(Psnr, "distances", fail)
    result = invoke_eval(tmp_path)
    assert result.exit_code == 1
    assert str(result.exception) == "deep inside"
    names = [frame.name for frame in traceback.extract_tb(result.exc_info[2])]
    assert names.index("evaluate") < names.index("fail")


def test_a_full_disk_in_the_middle_of_a_run_shows_where_it_was(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("toma_lab.evaluation.run.write_lossless", fail)
    result = invoke_eval(tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, OSError)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("eval", "--prompts", "nowhere.txt"), "prompts 'nowhere.txt': there is no such file"),
        (("eval", "--prompts", "here.txt", "--metrics", "psnr", "--steps", "0"), "steps=0 is not allowed"),
        (("generate", "a shoe", "--ratio", "2"), "ratio=2.0 is not allowed"),
        (("explain", "nowhere.png"), "'nowhere.png' does not exist"),
        (("report", "nowhere"), "'nowhere' is not a run"),
        (("report", "here.txt"), "'here.txt' is not a run"),
        (("bench", "--size", "huge"), "size 'huge' is not known"),
        (("bench", "--output", "here.txt/rows.csv"), "'here.txt/rows.csv' cannot be written"),
        (("bench", "--take-turns", "here.txt/lock"), "'here.txt/lock' cannot be written"),
        (("demo", "--output", "here.txt"), "'here.txt/run.json' cannot be written"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(command, message, tmp_path, monkeypatch):
    monkeypatch.setattr("toma_diffusion_demo.model_folder", pipeline_folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a red apple\n")
    name, *options = command
    device = () if name in ("explain", "report") else ("--device", "cpu")
    result = CliRunner().invoke(app, [name, *options, *device])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {message}")


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    result = invoke_eval(tmp_path)
    assert result.exit_code == 2
    assert "accelerate is not installed. Install it: pip install 'toma-diffusion[metrics]'" in result.stderr
