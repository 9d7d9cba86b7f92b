"""Pipelines of the families that came after Flux.1: opened from folders, guided and merged."""

import numpy as np
import pytest
import torch
from tiny_today_checkpoints import PIPELINES, checkpoint
from toma_lab.cli import app
from toma_lab.pipelines.checkpoints import load_pipeline, open_pipeline
from toma_lab.pipelines.generation import ImageRequest, generate_image, read_settings
from typer.testing import CliRunner

from toma_diffusion import UsageError

SIZE = {"width": 128, "height": 128}
each_pipeline = pytest.mark.parametrize("name", PIPELINES)


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in PIPELINES, reason="needs a newer diffusers")


def invoke(command: str, name: str, *arguments: object):
    model = ["--model", str(checkpoint(name)), "--device", "cpu"]
    return CliRunner().invoke(app, [command, *map(str, arguments), *model], env={"COLUMNS": "200"})


@each_pipeline
def test_guidance_is_a_second_sample_and_steps_are_reported(name):
    """By default all are guided. Some put both samples into one call, others make two calls."""
    pipe, samples = load_pipeline(str(checkpoint(name)), device="cpu"), []

    def count(module, args, kwargs):
        samples.append(len(args[0] if args else kwargs["hidden_states"]))

    pipe.transformer.register_forward_pre_hook(count, with_kwargs=True)
    images = []
    for guidance, expected in ((None, 2), (0.0, 1), (8.0, 2)):
        samples.clear()
        steps: list[int] = []
        request = ImageRequest("a shoe", steps=2, guidance=guidance, **SIZE)
        images.append(np.asarray(generate_image(pipe, request, steps.append)))
        assert sum(samples) == 2 * expected
        assert steps == [0, 1]
    assert images[0].shape == (128, 128, 3)
    assert len({image.tobytes() for image in images}) == 3


@each_pipeline
def test_half_precision_is_that_of_the_family(name):
    transformer = open_pipeline(str(checkpoint(name))).transformer
    dtypes = {parameter.dtype for parameter in transformer.parameters()}
    assert dtypes - {torch.float32} == {torch.float16 if name == "auraflow" else torch.bfloat16}


@each_pipeline
def test_generate(name, tmp_path):
    output = tmp_path / "shoe.png"
    size = ("--width", 256, "--height", 256)
    merging = ("--preset", "toma-stage:num_regions=4", "--steps", 2)
    result = invoke("generate", name, "a shoe", *size, *merging, "--output", output)
    assert result.exit_code == 0, result.output
    assert "256 → 128 tokens (4 tiles of 8×8)" in result.output
    assert read_settings(output)["model"] == checkpoint(name).name


@needs("z-image")
def test_what_the_call_itself_refuses_is_the_user_s_mistake():
    pipe = load_pipeline(str(checkpoint("z-image")), device="cpu")
    with pytest.raises(UsageError, match=r"ZImagePipeline does not accept these settings: .*divisible by 16"):
        generate_image(pipe, ImageRequest("a shoe", steps=1, width=100, height=128))
