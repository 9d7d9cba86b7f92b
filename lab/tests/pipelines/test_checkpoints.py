"""Opening pipelines."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from tiny_text import pipeline_folder
from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name, steps_and_guidance
from toma_lab.pipelines.generation import ImageRequest, generate_image

from toma_diffusion import UsageError


def test_a_folder_is_ready_to_generate(capfd):
    pipe = load_pipeline(str(pipeline_folder()), device="cpu")
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}
    capfd.readouterr()
    assert generate_image(pipe, ImageRequest("a red apple", steps=1)).size == (64, 64)
    assert "%|" not in capfd.readouterr().err  # no progress bar


def test_loading_prints_nothing_and_restores_the_log_levels():
    folder = str(pipeline_folder())
    load = f"from toma_lab.pipelines.checkpoints import load_pipeline; load_pipeline({folder!r}, 'cpu')"
    levels = (
        "from diffusers.utils import logging as d; from transformers.utils import logging as t; "
        "print(d.get_verbosity(), t.get_verbosity(), d.is_progress_bar_enabled(), t.is_progress_bar_enabled())"
    )
    code = f"{levels}; {load}; {levels}"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stderr == ""
    before, after = printed.stdout.splitlines()
    assert before == after


def test_without_the_demo_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "toma_diffusion_demo", None)
    with pytest.raises(UsageError, match=r"pip install 'toma-diffusion-lab\[demo\]' .*pip install \./demo-model"):
        load_pipeline("bundled")


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("bundled", (None, None), (20, None)),
        ("bundled-4step", (None, None), (4, 1.0)),
        ("bundled-4step", (8, None), (8, 1.0)),
        ("bundled-4step", (None, 2.0), (4, 2.0)),
        ("owner/name", (8, 0.0), (8, 0.0)),
    ],
)
def test_what_is_given_comes_before_what_a_model_is_made_for(model, given, expected):
    assert steps_and_guidance(model, *given, usual_steps=20) == expected


def test_guidance_that_is_no_number_is_refused_before_a_model_is_loaded():
    with pytest.raises(UsageError, match="guidance=nan is not allowed: it must be 0 or more"):
        steps_and_guidance("bundled", 8, float("nan"), usual_steps=20)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "no such folder",
            "'no such folder' is not known: use one of bundled, bundled-4step, bundled-flux, bundled-video",
        ),
        (".", "could not be loaded as a diffusers pipeline"),
    ],
)
def test_what_is_no_model_is_quoted(model, message):
    with pytest.raises(ValueError, match=message):
        load_pipeline(model, device="cpu")


def test_precision():
    pipe = load_pipeline(str(pipeline_folder()), device="cpu", dtype="bfloat16")
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.bfloat16}
    with pytest.raises(ValueError, match="'half' is not known: use one of float16"):
        load_pipeline(str(pipeline_folder()), dtype="half")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (("model.diffusion_model.double_blocks.0.img_attn.qkv.weight",), "FluxPipeline"),
        (("model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight",), "StableDiffusion3Pipeline"),
        (
            ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.model.ln_final.weight"),
            "StableDiffusionXLPipeline",
        ),
        (("model.diffusion_model.input_blocks.0.0.weight",), "StableDiffusionPipeline"),
        (("double_blocks.0.img_attn.qkv.weight", "distilled_guidance_layer.in_proj.bias"), "ChromaPipeline"),
        (("model.diffusion_model.layers.0.adaLN_modulation.0.weight",), "ZImagePipeline"),
    ],
)
def test_a_single_file_is_recognised_by_its_weights(weights, expected, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    save_file({name: torch.zeros(1) for name in weights}, path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=f"the {expected} in it could not be loaded"):
        load_pipeline(str(path), device="cpu")


def test_a_single_file_that_diffusers_cannot_open_is_named(tmp_path):
    """FLUX.2 has weights of the same names as Flux.1."""
    path = tmp_path / "flux2.safetensors"
    weights = ("double_blocks.0.img_attn.qkv.weight", "single_stream_modulation.lin.weight")
    save_file({name: torch.zeros(1) for name in weights}, path)
    with pytest.raises(ValueError, match=r"holds a Flux2Pipeline, which diffusers .* cannot open from a single file"):
        load_pipeline(str(path), device="cpu")


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file({"lora.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not a complete model of a known kind"):
        load_pipeline(str(path), device="cpu")
    with pytest.raises(ValueError, match=r"cannot be read as a \.safetensors file"):
        load_pipeline(__file__, device="cpu")


def test_a_fingerprint_tells_weights_apart():
    first, second = (load_pipeline(str(pipeline_folder()), device="cpu") for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    with torch.no_grad():
        second.text_encoder.get_input_embeddings().weight.add_(1e-3)
    assert fingerprint(first) != fingerprint(second)


def test_public_names_do_not_contain_paths(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    assert [public_name(model) for model in (".", str(tmp_path / "model"), "../model/")] == ["model"] * 3
    assert [public_name(model) for model in ("owner/name", "bundled")] == ["owner/name", "bundled"]
