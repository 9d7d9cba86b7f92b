"""`toma generate`."""

import numpy as np
import pytest
from PIL import Image
from tiny_text import pipeline_folder, text_pipeline
from toma_lab.cli import app
from toma_lab.pipelines import checkpoints
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.generation import ImageRequest, generate_image, read_settings
from typer.testing import CliRunner


def invoke(*arguments: str):
    model = ["--model", str(pipeline_folder()), "--device", "cpu", "--steps", "2"]
    return CliRunner().invoke(app, ["generate", "a red apple", *model, *arguments], env={"COLUMNS": "300"})


def test_the_image_and_all_its_settings(tmp_path):
    output = tmp_path / "new" / "apple.png"
    result = invoke("--preset", "toma-stage:num_regions=4", "--ratio", "0.25", "--seed", "3", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert "ToMA, ratio 0.25, level 0: 64 → 48 tokens (4 tiles of 4×4) in 2 blocks" in result.output
    assert " s with toma-stage 0.25, num_regions=4" in result.output
    settings = read_settings(output)
    assert settings["prompt"] == "a red apple"
    assert (settings["seed"], settings["steps"], settings["method"]) == (3, 2, "toma-stage:num_regions=4")
    merge = settings["column"]["own"]["merge"]["settings"]
    assert (merge["num_regions"], merge["ratio"]) == (4, 0.25)
    assert settings["torch"]
    assert settings["model"] == pipeline_folder().name  # not its path
    assert str(pipeline_folder().parent).encode() not in output.read_bytes()
    assert Image.open(output).size == (64, 64)


def test_compared_with_the_unmerged_image(tmp_path):
    output = tmp_path / "both.png"
    result = invoke("--compare", "--preset", "toma-stage:num_regions=4", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert " s as it is" in result.output
    assert "× as fast, PSNR " in result.output
    sheet = np.asarray(Image.open(output).convert("RGB"))
    whole = np.asarray(
        generate_image(load_pipeline(str(pipeline_folder()), "cpu"), ImageRequest("a red apple", steps=2))
    )
    assert np.array_equal(sheet[8:72, 8:72], whole)
    assert not np.array_equal(sheet[8:72, 80:144], whole)
    assert float(read_settings(output)["psnr"]) > 0


def test_the_default_says_what_it_left_whole(tmp_path):
    result = invoke("--output", str(tmp_path / "image.png"))
    assert result.exit_code == 0, result.output
    assert "64 → 64 tokens (left whole: fewer than min_tokens=512)" in result.output
    assert "merged from 50% to 100% of the steps" in result.output
    assert "note: nothing was merged" in result.output
    assert read_settings(tmp_path / "image.png")["method"] == "balanced"


def test_the_default_says_what_it_skipped(tmp_path):
    result = invoke("--steps", "8", "--output", str(tmp_path / "image.png"))
    assert result.exit_code == 0, result.output
    assert "6 of 8 steps were computed (0, 1, " in result.output
    assert "2 skipped and predicted" in result.output
    assert " s with balanced" in result.output
    assert "note" not in result.output


def test_other_methods_and_their_own_ratio(tmp_path):
    result = invoke("--preset", "todo", "--output", str(tmp_path / "image.png"))
    assert result.exit_code == 0, result.output
    assert read_settings(tmp_path / "image.png")["column"]["own"]["merge"]["settings"]["ratio"] == 0.75


def test_a_ratio_alone_merges(tmp_path):
    result = invoke("--ratio", "0.75", "--output", str(tmp_path / "image.png"))
    assert result.exit_code == 0, result.output
    assert "64 → 16 tokens" in result.output


def test_a_shortcut(tmp_path):
    result = invoke("--preset", "steps:1", "--output", str(tmp_path / "image.png"))
    assert result.exit_code == 0, result.output
    assert "1 steps are taken in place of 2." in result.output
    assert read_settings(tmp_path / "image.png")["steps"] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "bundled"], (20, None)),
        (["--model", "bundled-4step"], (4, 1.0)),
        (["--model", "bundled-4step", "--steps", "2", "--guidance", "3"], (2, 3.0)),
    ],
)
def test_the_defaults_are_those_of_the_model(arguments, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "load_pipeline", lambda *_: text_pipeline())
    output = tmp_path / "image.png"
    result = CliRunner().invoke(app, ["generate", "a red apple", *arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    settings = read_settings(output)
    assert (settings["model"], settings["steps"], settings["guidance"]) == (arguments[1], *expected)


def test_an_output_that_cannot_be_written_is_reported_before_anything_is_generated(tmp_path):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for output in (tmp_path / "folder.png", tmp_path / "file" / "image.png"):
        result = invoke("--output", str(output))
        assert result.exit_code == 2
        assert str(output.parent) in result.output
        assert " s with " not in result.output


def test_brackets_in_a_name_are_no_markup(tmp_path):
    result = invoke("--output", str(tmp_path / "a[/b] [red].png"))
    assert result.exit_code == 0, result.output
    assert "a[/b] [red].png" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "image.jpg"], "'image.jpg' is neither an image nor a clip: end it in .png"),
        (["--ratio", "1.5"], "ratio=1.5 is not allowed"),
        (["--preset", "fats"], "Did you mean 'fast'?"),
        (["--preset", "todo", "--ratio", "0.5"], "ratio=0.5 is not allowed"),
        (["--preset", "fast", "--ratio", "0.75"], "fast has no ratio that can be set"),
        (["--preset", "steps:1", "--ratio", "0.5"], "steps has no ratio that can be set: leave --ratio 0.5 out"),
        (["--guidance", "nan"], "guidance=nan is not allowed"),
        (["--steps", "0"], "steps=0 is not allowed"),
        (["--model", "nowhere"], "'nowhere' is not known"),
        (["--dtype", "half"], "'half' is not known"),
        (["--device", "gpu"], "device 'gpu' is not known"),
        (["--width", "80"], "width=80, height=None is not allowed"),
        (["--width", "81", "--height", "64"], "divisible by 8"),  # as diffusers says
        (["--steps", "1001"], "1001 cannot be larger"),
    ],
)
def test_wrong_input_is_quoted(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.output
    assert not list(tmp_path.iterdir())
