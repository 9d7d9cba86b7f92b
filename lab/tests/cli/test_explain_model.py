"""`toma explain --model`."""

import csv

import pytest
from PIL import Image
from tiny_text import pipeline_folder, text_pipeline
from toma_lab.cli import app
from toma_lab.pipelines import checkpoints
from typer.testing import CliRunner


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "300"})


def test_both_pictures_and_their_rows(tmp_path):
    output = tmp_path / "new" / "look.png"
    small = ["--device", "cpu", "--steps", "12", "--num-regions", "4"]
    result = invoke("--model", str(pipeline_folder()), *small, "--prompt", "a shoe", "--output", str(output))
    assert result.exit_code == 0, result.output
    for name in ("destinations", "hidden-states"):
        assert Image.open(output.with_name(f"look-{name}.png")).width > 600
    rows = list(csv.DictReader(output.with_name("look-destinations.csv").open()))
    assert {int(row["step"]) for row in rows} == set(range(12))
    assert {row["kind"] for row in rows} == {"level 0", "level 1"}
    assert all(float(row["share"]) == 1 for row in rows if row["step"] in ("0", "10"))
    assert any(float(row["share"]) < 1 for row in rows if row["step"] == "9")
    assert rows[0]["prompt"] == "a shoe"
    assert not output.exists()  # that is the name without --model


def test_the_four_step_model_takes_four_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_: text_pipeline())
    output = tmp_path / "look.png"
    result = invoke("--model", "bundled-4step", "--output", str(output))
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(output.with_name("look-destinations.csv").open()))
    assert {(row["model"], row["steps"]) for row in rows} == {("bundled-4step", "4")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["picture.png", "--model", "bundled"], "not both"),
        (["--model", "nowhere"], "'nowhere' is not known"),
        (["--model", "x/y", "--steps", "0"], "steps=0 is not allowed"),
        (["--model", "x/y", "--scale", "10"], "--scale can be used only without --model"),
        (["--prompt", "a shoe"], "--prompt can be used only with --model"),
    ],
)
def test_wrong_input_is_quoted(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
