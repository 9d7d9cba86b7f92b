"""Which errors of a command are the user's, and which keep their traceback."""

import pytest
import typer
from tiny_text import pipeline_folder
from toma_lab.cli import app
from toma_lab.cli.options import report_user_errors
from typer.testing import CliRunner

from toma_diffusion import UsageError


def run(error: Exception):
    command = typer.Typer()

    @command.command()
    @report_user_errors
    def fail(number: int = 1) -> None:
        raise error

    return CliRunner().invoke(command, ["--number", "2"])


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
    result = run(ModuleNotFoundError("No module named 'gradio.x'", name="gradio.x"))
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: gradio is not installed. Install it: pip install 'toma-diffusion-lab[playground]'.\n"
    )


def test_a_missing_module_of_our_own_is_a_bug():
    error = ModuleNotFoundError("No module named 'toma_diffusion.x'", name="toma_diffusion.x")
    assert run(error).exception is error


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
