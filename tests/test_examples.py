"""Every script in examples/ runs as it stands, on tiny pipelines that are opened from a folder."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_checkpoints import checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
ON_A_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # inductor takes a minute here; compiled code is tested in tests/families and tests/gpu
}


@pytest.fixture
def run_here(monkeypatch, capsys):
    """What a script prints, in this process, which has imported torch and diffusers: that takes longest."""

    def run(script: str, family: str, output: Path, *options: str) -> str:
        arguments = ["--model", str(checkpoint(family)), "--steps", "5", "--output", str(output), *options]
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", ON_A_CPU["TORCHDYNAMO_DISABLE"])
        monkeypatch.chdir(output.parent)
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


def test_sdxl_pipeline(run_here, tmp_path):
    printed = run_here("sdxl_pipeline.py", "sdxl", tmp_path / "image.png", "a red apple")
    assert "4 of 5 steps were computed" in printed
    assert "s with balanced" in printed
    assert size_of(tmp_path / "image.png") == size_of(tmp_path / "image-original.png") == (384, 384)


@pytest.mark.filterwarnings("ignore:CUDA graphs cannot be used here")
def test_flux_compiled(run_here, tmp_path):
    options = ("a blue shoe", "--mode", "graphs", "--size", "256", "--images", "2")
    printed = run_here("flux_compiled.py", "flux", tmp_path / "image.png", *options)
    assert "compiled: blocks" in printed  # CUDA graphs need a GPU
    assert "ToMA, ratio 0.5" in printed
    assert "256 → 128" in printed
    assert size_of(tmp_path / "image.png") == (256, 256)


def test_own_loop(run_here, tmp_path):
    printed = run_here("own_loop.py", "sd15", tmp_path / "image.png", "a green tree")
    assert "4 of 5 steps were computed" in printed
    assert size_of(tmp_path / "image.png") == (64, 64)


def test_compare_methods(run_here, tmp_path):
    printed = run_here("compare_methods.py", "sdxl", tmp_path / "image.png")
    for title in ("ToMA, ratio 0.5", "ToMeSD, ratio 0.5", "ToFu, ratio 0.5", "no merging: ", "tofu: "):
        assert title in printed
    assert size_of(tmp_path / "image.png") == (5 * 384, 384 + 20)


def test_several_gpus(tmp_path):
    """Two processes share the prompts."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red apple\na blue shoe\na green tree\n")
    script, model, images = EXAMPLES / "several_gpus.py", checkpoint("sdxl"), tmp_path / "images"
    options = ("--model", model, "--steps", "5", "--output", images, "--prompts", prompts)
    command = [sys.executable, *ACCELERATE, script, *options]
    result = subprocess.run(command, env=os.environ | ON_A_CPU, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert printed.count("4 of 5 steps were computed") == 1
    assert "3 images in" in printed
    assert "2 processes" in printed
    sizes = {path.name: size_of(path) for path in (tmp_path / "images").iterdir()}
    assert sizes == dict.fromkeys(["000.png", "001.png", "002.png"], (384, 384))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_list_of_examples_names_every_script(name):
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()
