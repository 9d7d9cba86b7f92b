"""benchmarks/reproduce.sh, with a short script in the place of python3: hours of a GPU would show no more."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toma_lab.bench.inputs import FAMILIES
from toma_lab.bench.zoo import MODELS
from toma_lab.columns import ColumnSpec
from toma_lab.parsing import Resolution, split_list

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PARTS = [
    "presets",
    "skip",
    "methods",
    "bounds",
    "flux",
    "today",
    "video",
    "cache",
    "few-steps",
    "pipeline",
    "eager",
    "operators",
]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")


def start(folder: Path, python: str, *parts: str) -> subprocess.Popen[str]:
    """The script, in whose place of python3 that line runs."""
    stand_in = folder / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(BENCHMARKS / "reproduce.sh"), str(folder / "rows, größer"), *parts]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def commands_of(folder: Path, *parts: str) -> dict[str, dict[str, str]]:
    """The options of every `toma bench` that the script would run, by the name of its file."""
    process = start(folder, 'echo "$@"', *parts)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [line.partition(":")[0] for line in output.splitlines()] == [*(parts or PARTS)]
    found = {}
    for path in (folder / "rows, größer").glob("*.log"):
        given = path.read_text().split()
        if "--model" in given:
            first = given.index("--model")
            found[path.stem] = dict(zip(given[first::2], given[first + 1 :: 2], strict=True))
    return found


def test_all_parts_time_models_that_are_known_by_methods_that_are_possible(tmp_path):
    commands = commands_of(tmp_path)
    for options in commands.values():
        model = MODELS[options["--model"]]
        if "--resolution" in options:
            Resolution.parse(options["--resolution"], FAMILIES[model["class"]].multiple)
        for text in split_list(options["--methods"]):
            ColumnSpec.parse(text)
    of_clips = {name for name in commands if name.startswith("video-")}
    assert of_clips == {f"video-{name}" for name, model in MODELS.items() if len(model["size"]) == 3}
    assert not any("--resolution" in commands[name] for name in of_clips)  # that of the model


@pytest.mark.parametrize(
    ("part", "model", "names"),
    [
        ("today", "qwen-image", {"today-qwen-image-1328", "today-qwen-image-2048"}),
        ("video", "wan-480p", {"video-wan-480p"}),
    ],
)
def test_one_model_alone(part, model, names, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", model)
    commands = commands_of(tmp_path, part)
    assert set(commands) == names
    assert {options["--model"] for options in commands.values()} == {model}


def test_what_fails_is_named(tmp_path):
    process = start(tmp_path, "echo no GPU; case $* in *0.5*|*merge*) exit 1;; esac", "bounds", "operators")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    failed = [line.partition(" failed, see ")[0] for line in errors.splitlines()]
    assert failed == ["bounds-toma-0.5", "bounds-local-0.5", "merge"]
    assert all(line.endswith(".log: no GPU") for line in errors.splitlines())


def test_unknown_parts_are_named_before_anything_runs(tmp_path):
    process = start(tmp_path, "exit 0", "few-steps", "bogus")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert "unknown part 'bogus'" in errors


def test_interrupted_it_takes_its_benchmarks_along(tmp_path):
    """Bash lets what runs in the background ignore Ctrl-C: nine benchmarks would keep the GPU."""
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    os.mkfifo(ready)
    benchmark = f"trap 'touch {ended}; exit' TERM; echo > {ready}; for i in $(seq 100); do sleep 0.1; done"
    process = start(tmp_path, benchmark, "few-steps")
    ready.read_text()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    give_up = time.monotonic() + 5
    while not ended.exists():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["bench_facility_location", "bench_weights", "bench_merge"])
def test_operators_are_timed(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    operators = importlib.import_module("operators")
    monkeypatch.setattr(operators, "REPEATS", 1)
    for row in importlib.import_module(name).measure(operators.SHAPES[0]):
        assert row["us"] > 0
