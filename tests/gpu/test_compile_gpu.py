"""`handle.compile` on a GPU: CUDA graphs that a user reaches, on whole pipelines."""

import pytest
import torch
from gpu_models import on_gpu
from merging import remove, steady
from tiny import FAMILIES
from tiny_pipelines import PIPELINES, denoiser, embeds, run

from toma_diffusion import Merge
from toma_diffusion.merge import Action, Grid, MergePlan

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()


def generate(pipe, **arguments) -> torch.Tensor:
    prompts = {name: on_gpu(value, torch.float32) for name, value in embeds(pipe).items()}
    return run(pipe, **{"num_inference_steps": 6} | prompts | arguments)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
@pytest.mark.parametrize("scope", ["module", "stage"])
def test_graphs_in_a_pipeline(name, scope):
    """The same pictures as without graphs, also with another size and number of steps, also switched off."""
    pipe = PIPELINES[name]().to("cuda")
    handle = steady(pipe, scope=scope, select_every=4, reweigh_every=2, window=(0.3, 1.0))
    cases = [{}, {"height": 192, "width": 128}, {"num_inference_steps": 4}, {}]
    expected = [generate(pipe, **case) for case in cases]
    assert handle.compile("graphs") == "graphs"
    for case, truth in zip(cases, expected, strict=True):
        torch.testing.assert_close(generate(pipe, **case), truth, atol=2e-2, rtol=2e-2)
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(generate(pipe), expected[0], atol=2e-2, rtol=2e-2)
    handle.enabled = False
    switched_off = generate(pipe)
    remove(pipe)
    torch.testing.assert_close(switched_off, generate(pipe), atol=2e-2, rtol=2e-2)


def test_two_passes_a_step_keep_their_outputs():
    """Separate guidance: the first pass's result must outlive the second's replay."""
    family = BY_NAME["flux"]
    model, inputs = family.build().to("cuda"), on_gpu(family.inputs(), torch.float32)
    handle = steady(model, scope="stage")
    other = inputs | {"encoder_hidden_states": inputs["encoder_hidden_states"].flip(0) * 2}
    with torch.no_grad():
        expected = [model(**each, return_dict=False)[0].clone() for each in (inputs, other)]
        handle.compile("graphs")
        for _ in range(4):
            outputs = [model(**each, return_dict=False)[0] for each in (inputs, other)]
    for output, truth in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, truth, atol=1e-3, rtol=1e-3)


def test_plans_of_a_captured_graph_stay():
    family = BY_NAME["flux"]
    model, inputs = family.build().to("cuda", torch.float16), on_gpu(family.inputs(), torch.float16)
    handle = steady(model, scope="stage")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        truth = model(**inputs, return_dict=False)[0].clone()
        stream.synchronize()
        handle.reset()
        with torch.cuda.graph(graph, stream=stream):
            output = model(**inputs, return_dict=False)[0]
    larger = on_gpu(family.inputs(height=16, wide=16), torch.float16)
    for _ in range(3):  # other sizes, generation after generation
        with torch.no_grad():
            model(**larger | {"encoder_hidden_states": larger["encoder_hidden_states"].clone()})
    torch.cuda.empty_cache()
    torch.full((64, 2**20), torch.nan, device="cuda")  # whatever was freed is overwritten
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output, truth, atol=1e-3, rtol=1e-3)


def test_offloading_falls_back_with_a_warning():
    model = BY_NAME["sdxl"].build()
    model.enable_group_offload(onload_device=torch.device("cuda"), offload_type="leaf_level")
    handle = steady(model)
    with pytest.warns(UserWarning, match="CUDA graphs cannot be used here: weights are offloaded"):
        assert handle.compile("graphs") == "blocks"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_take_tokens_of_another_precision(dtype):
    plans = [
        MergePlan(Grid(16, 16), Merge(num_regions=16, backend=backend), batch_size=1, device="cuda")
        for backend in ("triton", "torch")
    ]
    tokens = torch.randn(1, 256, 64, device="cuda")
    for plan in plans:
        plan.update(tokens, Action.SELECT)
    merged = [plan.merge(tokens.to(dtype)) for plan in plans]
    torch.testing.assert_close(*merged, atol=2e-2, rtol=2e-2)
    restored = [plan.unmerge(merged[0], residual=tokens) for plan in plans]
    assert restored[0].dtype == restored[1].dtype == torch.float32
    torch.testing.assert_close(*restored, atol=2e-2, rtol=2e-2)


def test_autocast():
    pipe = PIPELINES["sdxl"]().to("cuda")
    handle = steady(pipe)
    with torch.autocast("cuda", torch.bfloat16):
        picture = generate(pipe)
    assert picture.isfinite().all()
    assert handle.summary().merge.backend == "triton"
    assert denoiser(pipe).dtype == torch.float32
