"""The seam on a GPU: half precision, no synchronisation in the loop, inductor, CUDA graphs."""

import math

import pytest
import torch
from gpu_models import compile_model, no_waiting, on_gpu, steps
from merging import merged, remove
from pairs import named, pairwise
from tiny import FAMILIES, SCOPES

BY_NAME = {family.name: family for family in FAMILIES}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.mark.parametrize(
    ("family", "scope", "dtype"), pairwise(FAMILIES, SCOPES, (torch.float16, torch.bfloat16)), ids=named
)
def test_half_precision_runs_and_is_restored(family, scope, dtype):
    model, inputs = family.build().to("cuda", dtype), on_gpu(family.inputs(), dtype)
    before = steps(model, inputs, 1)[0]
    merged(model, scope=scope)
    output = steps(model, inputs, 1)[0]
    assert output.isfinite().all()
    assert not torch.equal(output, before)
    remove(model)
    assert torch.equal(steps(model, inputs, 1)[0], before)


@every_family
@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_waits_for_the_device_in_the_loop(family, scope):
    """After the first step, which may read position ids, CUDA itself raises at any synchronisation."""
    model, inputs = family.build().to("cuda", torch.float16), on_gpu(family.inputs(), torch.float16)
    merged(model, select_every=2, reweigh_every=1, scope=scope)
    steps(model, inputs, 1)
    with no_waiting():
        steps(model, inputs, 5)


@pytest.mark.parametrize("how", ["by block", "whole, in CUDA graphs"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sdxl", {"scope": "module"}),
        ("sdxl", {"scope": "module", "scale": math.inf, "assign": "global"}),
        ("sdxl", {"scope": "module", "share_plan": True}),
        ("sdxl", {"scope": "stage"}),
        ("flux", {"scope": "module"}),
        ("flux", {"scope": "stage"}),
        ("sd3", {"scope": "block"}),
    ],
)
def test_inductor_equals_eager(name, settings, how, monkeypatch):
    """One block is left alone. CUDA graphs hold the addresses of the plans' buffers."""
    # Convolutions in TF32 differ by 1e-4 from one algorithm to another: enough to break ties, and with rotation every
    # choice after them.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()
    family = BY_NAME[name]
    model, eager = family.build().to("cuda"), family.build().to("cuda")
    inputs = on_gpu(family.inputs(), torch.float32)
    for each in (model, eager):
        merged(each, **{"skip_blocks": (0,), "select_every": 4, "reweigh_every": 2} | settings)
    compile_model(model, how)
    compiled, plain = steps(model, inputs, 12), steps(eager, inputs, 12)
    for ours, theirs in zip(compiled, plain, strict=True):
        # The median: kernels round differently, and a tie between two tokens may be broken the other way.
        assert (ours - theirs).abs().median() < 1e-3


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_captured_by_hand(name, scope):
    """One graph for every action; replayed in the schedule's order they make the images of eager steps."""
    family = BY_NAME[name]
    model, inputs = family.build().to("cuda", torch.float16), on_gpu(family.inputs(), torch.float16)
    handle = merged(model, select_every=4, reweigh_every=2, scope=scope)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        expected = [model(**inputs, return_dict=False)[0].clone() for _ in range(4)]
        stream.synchronize()
        handle.reset()
        graphs, outputs, pool = [], [], torch.cuda.graph_pool_handle()
        for _ in range(4):  # select, reuse, reweigh, reuse
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool, stream=stream):
                outputs.append(model(**inputs, return_dict=False)[0])
    for graph, output, truth in zip(graphs, outputs, expected, strict=True):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(output, truth, atol=1e-3, rtol=1e-3)
