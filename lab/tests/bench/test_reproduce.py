"""benchmarks/reproduce.sh, with a short script in the place of python3: hours of a GPU would tell no more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toma_lab.bench.inputs import FAMILIES
from toma_lab.bench.published import MODELS
from toma_lab.experiments.cells import MethodSpec
from toma_lab.parsing import Resolution, split_list

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reproduce.sh"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")


def start(folder: Path, python: str, *parts: str) -> subprocess.Popen[str]:
    """The script, in whose place of python3 that line runs."""
    stand_in = folder / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\n{python}\n")
    stand_in.chmod(0o755)
    environment = os.environ | {"PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), str(folder / "rows, größer"), *parts]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_all_parts_by_default(tmp_path):
    process = start(tmp_path, "exit 0")
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [line.partition(":")[0] for line in told.splitlines()] == [
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


def test_one_model_of_today_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "qwen-image")
    process = start(tmp_path, 'echo "$@"', "today")
    process.communicate(timeout=60)
    assert process.returncode == 0
    logs = {path.name: path.read_text() for path in (tmp_path / "rows, größer").glob("*.log")}
    assert set(logs) == {"today-qwen-image-1328.log", "today-qwen-image-2048.log"}
    options = "--modes compiled --steps 4 --repeats 1 --bounds none --resolution 2048"
    assert f"--model qwen-image {options} " in logs["today-qwen-image-2048.log"]


def test_the_models_of_today_are_known_and_their_methods_are_possible(tmp_path):
    process = start(tmp_path, 'echo "$@"', "today")
    process.communicate(timeout=60)
    for path in (tmp_path / "rows, größer").glob("*.log"):
        given = path.read_text().split()
        options = dict(zip(given[given.index("--model") :: 2], given[given.index("--model") + 1 :: 2], strict=True))
        published = MODELS[options["--model"]]
        Resolution.parse(options["--resolution"], FAMILIES[published.class_name].multiple)
        ratios = [MethodSpec.parse(text).possible([0.5, 0.75]) for text in split_list(options["--methods"])]
        assert [len(each) for each in ratios] == [2]


def test_the_models_of_clips_are_timed_one_after_the_other(tmp_path):
    process = start(tmp_path, 'echo "$@"', "video")
    process.communicate(timeout=60)
    assert process.returncode == 0
    logs = sorted((tmp_path / "rows, größer").glob("*.log"))
    named = {path.name.removeprefix("video-").removesuffix(".log") for path in logs}
    assert named == {name for name, published in MODELS.items() if published.clip}
    for path in logs:
        given = path.read_text().split()
        options = dict(zip(given[given.index("--model") :: 2], given[given.index("--model") + 1 :: 2], strict=True))
        assert "--resolution" not in options  # that of the model
        specs = [MethodSpec.parse(text) for text in split_list(options["--methods"])]
        assert [len(spec.possible([0.5, 0.75])) for spec in specs] == [2, 2]
        assert specs[1].overrides == (("region_frames", 1),)


def test_one_model_of_clips_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELS", "wan-480p")
    process = start(tmp_path, 'echo "$@"', "video")
    process.communicate(timeout=60)
    assert [path.name for path in (tmp_path / "rows, größer").glob("*.log")] == ["video-wan-480p.log"]


def test_what_fails_is_named(tmp_path):
    process = start(tmp_path, "echo no GPU; case $* in *0.5*|*merge*) exit 1;; esac", "bounds", "operators")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    failed = [line.partition(" failed, see ")[0] for line in errors.splitlines()]
    assert failed == ["bounds-toma-0.5", "bounds-local-0.5", "merge"]
    assert all(line.endswith(".log: no GPU") for line in errors.splitlines())


def test_unknown_parts_are_told_before_anything_runs(tmp_path):
    process = start(tmp_path, "exit 0", "few-steps", "bogus")
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, told) == (2, "")
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
