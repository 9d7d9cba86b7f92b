"""Skipped steps on a GPU: compiled code, CUDA graphs, half precision, offloading, and that nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_models import no_waiting, on_gpu
from tiny import FAMILIES
from tiny_pipelines import PIPELINES, denoiser, embeds, run

from toma_diffusion import Handle, Skip, speed_up

BY_NAME = {family.name: family for family in FAMILIES}
HALF = Skip(computed=0.5)


def counts(handle: Handle) -> tuple[int, int]:
    skip = handle.summary().skip
    assert skip is not None
    return skip.num_computed, skip.num_predicted


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()


def generate(pipe: Any, **arguments: Any) -> torch.Tensor:
    prompts = {name: on_gpu(value, torch.float32) for name, value in embeds(pipe).items()}
    return run(pipe, **{"num_inference_steps": 8} | prompts | arguments)


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3"])
@pytest.mark.parametrize("mode", ["graphs", "whole", "blocks"])
def test_compiled_in_a_pipeline(name: str, mode: str) -> None:
    """The same pictures as not compiled, also with another size and number of steps; nothing is compiled again."""
    pipe = PIPELINES[name]().to("cuda")
    handle = speed_up(pipe, skip=HALF)
    cases = [{}, {"height": 192, "width": 128}, {"num_inference_steps": 5}]
    expected = [generate(pipe, **case) for case in cases]
    assert handle.compile(mode) == mode
    for case, truth in zip(cases, expected, strict=True):
        torch.testing.assert_close(generate(pipe, **case), truth, atol=2e-2, rtol=2e-2)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(generate(pipe), expected[0], atol=2e-2, rtol=2e-2)
    assert counts(handle) == (4, 4)
    handle.remove()
    assert not any("_compiled_call_impl" in vars(module) for module in denoiser(pipe).modules())


def test_a_model_that_the_user_compiled() -> None:
    pipe = PIPELINES["flux"]().to("cuda")
    speed_up(pipe, skip=HALF)
    expected = generate(pipe)
    pipe.transformer = torch.compile(pipe.transformer, mode="reduce-overhead", fullgraph=True)
    torch.testing.assert_close(generate(pipe), expected, atol=2e-2, rtol=2e-2)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(generate(pipe), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["sdxl", "flux", "sd3", "pixart"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    family = BY_NAME[name]
    model = family.build().to("cuda", dtype)
    inputs = on_gpu(family.inputs(), dtype)
    handle = speed_up(model, skip=HALF)
    handle.begin(8)
    outputs = []
    for step in range(8):
        handle.step(step)
        with torch.no_grad():
            outputs.append(model(**inputs, return_dict=False)[0])
    assert counts(handle) == (4, 4)
    for output in outputs[1:]:
        assert output.dtype == dtype
        torch.testing.assert_close(output, outputs[0], atol=0.05, rtol=0.05)


def test_nothing_waits_for_the_gpu() -> None:
    family = BY_NAME["flux"]
    model, inputs = family.build().to("cuda"), on_gpu(family.inputs(), torch.float32)
    handle = speed_up(model, skip=HALF)

    def generation() -> None:
        handle.begin(8)
        for step in range(8):
            handle.step(step)
            with torch.no_grad():
                model(**inputs, return_dict=False)

    generation()
    with no_waiting():
        generation()


@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloaded(offload: str) -> None:
    """The same pictures as on the GPU alone."""
    whole, pipe = PIPELINES["sdxl"]().to("cuda"), PIPELINES["sdxl"]()
    speed_up(whole, skip=HALF)
    getattr(pipe, offload)()
    handle = speed_up(pipe, skip=HALF)
    torch.testing.assert_close(generate(pipe), generate(whole), atol=2e-2, rtol=2e-2)
    assert counts(handle) == (4, 4)
