"""Reuse over time on a GPU: half precision, CUDA graphs that a user reaches, memory."""

import pytest
import torch
from gpu_models import on_gpu
from tiny import FAMILIES
from tiny_pipelines import PIPELINES, denoiser, embeds, run

from toma_diffusion import Reuse, ToMAConfig, apply_toma, remove_toma

BY_NAME = {family.name: family for family in FAMILIES}
PLAIN = ToMAConfig(ratio=0, reuse=Reuse(period=2, start=0.3))


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()


def generate(pipe, **arguments) -> torch.Tensor:
    prompts = {name: on_gpu(value, torch.float32) for name, value in embeds(pipe).items()}
    return run(pipe, **{"num_inference_steps": 8} | prompts | arguments)


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3"])
@pytest.mark.parametrize("mode", ["graphs", "blocks"])
def test_compiled_in_a_pipeline(name, mode):
    """The same pictures as not compiled, also with another size and number of steps; nothing is compiled again."""
    pipe = PIPELINES[name]().to("cuda")
    handle = apply_toma(pipe, PLAIN.changed({"part": "deep"}))
    cases = [{}, {"height": 192, "width": 128}, {"num_inference_steps": 5}]
    expected = [generate(pipe, **case) for case in cases]
    assert handle.compile(mode) == mode
    for case, truth in zip(cases, expected, strict=True):
        torch.testing.assert_close(generate(pipe, **case), truth, atol=2e-2, rtol=2e-2)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(generate(pipe), expected[0], atol=2e-2, rtol=2e-2)
    assert handle.summary().steps[1] > 0
    remove_toma(pipe)
    assert not any("forward" in vars(module) for module in denoiser(pipe).modules())


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3", "pixart"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name, dtype):
    """With the same input in every step the changes are the same: a step that reuses equals a computed one."""
    family = BY_NAME[name]
    model = family.build().to("cuda", dtype)
    inputs = on_gpu(family.inputs(), dtype)
    handle = apply_toma(model, PLAIN)
    handle.begin(8)
    outputs = []
    for step in range(8):
        handle.step(step)
        with torch.no_grad():
            outputs.append(model(**inputs, return_dict=False)[0])
    assert handle.summary().steps == (5, 3)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=0.05, rtol=0.05)


def test_nothing_waits_for_the_gpu():
    family = BY_NAME["flux"]
    model, inputs = family.build().to("cuda"), on_gpu(family.inputs(), torch.float32)
    handle = apply_toma(model, PLAIN)

    def generation():
        handle.begin(8)
        for step in range(8):
            handle.step(step)
            with torch.no_grad():
                model(**inputs, return_dict=False)

    generation()
    torch.cuda.set_sync_debug_mode("error")
    try:
        generation()
    finally:
        torch.cuda.set_sync_debug_mode("default")
