"""The other methods on a GPU: half precision, no synchronisation in the loop, inductor, CUDA graphs."""

import csv

import pytest
import torch
from gpu_models import compile_model, no_waiting, on_gpu, steps
from method_cases import applied, first_families
from tiny import one
from toma_lab.cli import app
from typer.testing import CliRunner


@first_families
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_and_is_restored(method, family, dtype):
    model, inputs = family.build().to("cuda", dtype), on_gpu(family.inputs(), dtype)
    before, state = steps(model, inputs, 1)[0], torch.cuda.get_rng_state()
    handle = applied(model, method, ratio=0.75)
    merged = steps(model, inputs, 1)[0]
    assert merged.isfinite().all()
    assert not torch.equal(merged, before)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    handle.remove()
    assert torch.equal(steps(model, inputs, 1)[0], before)


@first_families
def test_nothing_waits_for_the_device_in_the_loop(method, family):
    model, inputs = family.build().to("cuda", torch.float16), on_gpu(family.inputs(), torch.float16)
    applied(model, method, ratio=0.75)
    steps(model, inputs, 1)
    with no_waiting():
        steps(model, inputs, 5)


@pytest.mark.parametrize("how", ["by block", "whole, in CUDA graphs"])
@pytest.mark.parametrize(
    ("method", "name"), [("tomesd", "sdxl"), ("tomesd", "flux"), ("tofu", "sdxl"), ("todo", "sdxl")]
)
def test_inductor_equals_eager(method, name, how):
    torch.compiler.reset()
    family = one(name)
    model, eager = family.build().to("cuda"), family.build().to("cuda")
    inputs = on_gpu(family.inputs(), torch.float32)
    for each in (model, eager):
        applied(each, method, ratio=0.75)
    compile_model(model, how)
    for ours, theirs in zip(steps(model, inputs, 4), steps(eager, inputs, 4), strict=True):
        assert (ours - theirs).abs().median() < 1e-3


@pytest.mark.parametrize("model", ["sdxl", "flux"])
@pytest.mark.parametrize("compiled", ["none", "block"])
def test_captured_and_timed(model, compiled, tmp_path):
    """A graph that is being captured keeps the draws of the call before."""
    path, methods = tmp_path / "rows.csv", "tomesd,tofu" if model == "flux" else "tomesd,tofu,todo"
    arguments = f"bench --model {model} --size small --steps 3 --repeats 2 --ratios 0.75 --modes graph"
    result = CliRunner().invoke(
        app, [*arguments.split(), "--compile", compiled, "--methods", methods, "--output", str(path)]
    )
    assert result.exit_code == 0, result.output
    with path.open(newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["baseline", *methods.split(",")]
