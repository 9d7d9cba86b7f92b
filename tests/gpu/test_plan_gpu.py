"""The plan on a GPU, by kernels and in plain torch: against float32, compiled by inductor, inside CUDA graphs."""

import math

import pytest
import torch

from toma_diffusion import Merge, ops
from toma_diffusion.merge import Action, Grid, MergePlan, Schedule
from toma_diffusion.merge.config import ASSIGNMENTS

GRID = Grid(64, 64)
BACKENDS = ("torch", "triton")

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(dtype: torch.dtype = torch.float16, joint: bool = False, **settings) -> MergePlan:
    return MergePlan(GRID, Merge(**settings), batch_size=2, dtype=dtype, device="cuda", joint=joint)


def step(plan: MergePlan, tokens: torch.Tensor, action: Action) -> torch.Tensor:
    plan.update(tokens, action)
    return tokens + plan.unmerge(torch.tanh(plan.merge(tokens)))


def test_kernels_are_what_runs_by_default():
    assert make().backend == "triton"
    assert make(backend="torch").backend == "torch"


@every_backend
@pytest.mark.parametrize("assign", ASSIGNMENTS)
@pytest.mark.parametrize("scale", [1000.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near_float32(assign, scale, dtype, backend):
    """With the same destinations: a tie may be broken the other way."""
    tokens = torch.randn(2, GRID.num_tokens, 320, device="cuda").to(dtype)
    plan = make(dtype, assign=assign, scale=scale, backend=backend)
    truth = make(torch.float32, assign=assign, scale=scale, backend="torch")
    truth.update(tokens.float(), Action.SELECT)
    plan.update(tokens, Action.SELECT)
    plan.destinations.copy_(truth.destinations)
    plan.update(tokens, Action.REWEIGH)
    difference = plan.unmerge(plan.merge(tokens)).float() - truth.unmerge(truth.merge(tokens.float()))
    near = (difference.abs() <= 8 * torch.finfo(dtype).eps).all(dim=-1)
    if scale == math.inf:  # a token between two destinations, and all that share its cluster, may go either way
        assert near.float().mean() > 0.99
    else:
        assert near.all()


def test_selection_is_as_good_as_on_the_cpu():
    """Rounding may break a tie the other way, so the value reached is compared, not the picks."""
    tokens = torch.randn(8, 64, 16, dtype=torch.float64)
    similarity = ops.cosine_similarity(tokens)
    here = ops.facility_location_value(similarity, ops.facility_location(similarity, 32))
    there = ops.facility_location_value(similarity, ops.facility_location(similarity.cuda(), 32).cpu())
    torch.testing.assert_close(there, here, rtol=1e-3, atol=0)


def test_batch_chooses_as_well_as_single_samples():
    """The value reached, again: another batch may round otherwise."""
    tokens = torch.randn(2, GRID.num_tokens, 64, device="cuda")
    together = make(dtype=torch.float32)
    together.update(tokens, Action.SELECT)
    for index in range(2):
        sample = tokens[index : index + 1]
        alone = MergePlan(GRID, Merge(), batch_size=1, device="cuda")
        alone.update(sample, Action.SELECT)
        similarity = ops.cosine_similarity(sample)
        reached = [
            ops.facility_location_value(similarity, positions)[:, -1]
            for positions in (together.positions[index : index + 1], alone.positions)
        ]
        torch.testing.assert_close(*reached, rtol=1e-3, atol=0)


@every_backend
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    "settings", [{}, {"scale": math.inf}, {"assign": "global"}, {"joint": True}, {"num_regions": 1024}]
)
def test_compiled_whole_graph_equals_eager(settings, mode, backend):
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    plan, twin, schedule = make(backend=backend, **settings), make(backend=backend, **settings), Schedule()
    for buffer in plan.buffers:
        torch._dynamo.mark_static_address(buffer, guard=False)
    for index in range(12):
        tokens = torch.randn(2, GRID.num_tokens, 64, device="cuda", dtype=torch.float16)
        action = schedule.action(index, 12)
        torch.testing.assert_close(compiled(plan, tokens, action), step(twin, tokens, action), atol=4e-3, rtol=4e-3)


@every_backend
@pytest.mark.parametrize("scale", [1000.0, math.inf])
@pytest.mark.parametrize("action", list(Action))
def test_captured_graph_replays_the_plan_in_place(action, scale, backend):
    tokens = torch.randn(2, GRID.num_tokens, 64, device="cuda", dtype=torch.float16)
    plan = make(scale=scale, backend=backend)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(plan, tokens, action)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(plan, tokens, action)
    tokens.copy_(torch.randn_like(tokens))
    twin = make(scale=scale, backend=backend)
    twin.positions.copy_(plan.positions)
    graph.replay()
    expected = tokens + plan.unmerge(torch.tanh(plan.merge(tokens)))
    torch.testing.assert_close(output, expected)
    if action is Action.SELECT:
        twin.update(tokens, action)
        assert torch.equal(plan.positions, twin.positions)


@every_backend
@pytest.mark.parametrize("scale", [1000.0, math.inf])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_stays_in_bounds(bad, scale, backend):
    """An index out of bounds would be a device-side assertion at the synchronisation."""
    tokens = torch.randn(2, GRID.num_tokens, 64, device="cuda", dtype=torch.float16)
    tokens[0, 100:3000] = bad
    plan = make(scale=scale, backend=backend)
    step(plan, tokens, Action.SELECT)
    torch.cuda.synchronize()
    assert all(row.unique().numel() == plan.num_destinations for row in plan.positions)
