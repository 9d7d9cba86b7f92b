"""The three ways between tokens and destinations, and the same way taken by kernels and by compiled code."""

import math

import pytest
import torch

from toma_diffusion import Action, Grid, MergePlan, ToMAConfig, ops

SETTINGS = [{"assign": "local"}, {"assign": "global"}, {"region": "stripe"}]


def selected(tokens, grid, **settings):
    plan = MergePlan(grid, ToMAConfig(num_regions=4, **settings), batch_size=len(tokens), dtype=tokens.dtype)
    plan.update(tokens, Action.SELECT)
    return plan


@pytest.mark.parametrize("settings", SETTINGS)
class TestHard:
    def test_is_the_limit_of_soft(self, settings):
        tokens = torch.randn(2, 60, 32)
        settings = settings | {"selection": "strided"}  # so that both have the same destinations
        soft = selected(tokens, Grid(6, 10), scale=1e7, **settings)
        hard = selected(tokens, Grid(6, 10), scale=math.inf, **settings)
        assert torch.equal(hard.positions, soft.positions)
        torch.testing.assert_close(hard.weights, soft.weights)
        torch.testing.assert_close(hard.merge(tokens), soft.merge(tokens))
        torch.testing.assert_close(hard.unmerge(hard.merge(tokens)), soft.unmerge(soft.merge(tokens)))

    def test_merges_as_its_matrix_says(self, settings):
        tokens = torch.randn(3, 60, 8)
        plan = selected(tokens, Grid(6, 10), scale=math.inf, ratio=0.75, **settings)
        assert ((plan.weights == 0) | (plan.weights == 1)).all()
        split = plan.assign_regions.split(tokens)
        expected = ops.merge(split, plan.weights).reshape(3, plan.num_destinations, 8)
        torch.testing.assert_close(plan.merge(tokens), expected)

    def test_no_destination_is_empty_even_among_equals(self, settings):
        plan = selected(torch.ones(2, 60, 8), Grid(6, 10), scale=math.inf, **settings)
        assert (plan.weights.sum(dim=-1) >= 1).all()
        rows = plan.assignment.targets.gather(1, plan.positions)
        assert torch.equal(rows, torch.arange(plan.num_destinations).expand(2, -1))

    def test_gradient(self, settings):
        plan = selected(torch.randn(1, 60, 4), Grid(6, 10), scale=math.inf, **settings)
        tokens = torch.randn(1, 60, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: plan.unmerge(plan.merge(x)), (tokens,))

    def test_fixed_projection(self, settings):
        settings = {"assign": "local"} | settings
        first = selected(torch.randn(2, 60, 8), Grid(6, 10), scale=math.inf, selection="none", **settings)
        again = selected(torch.randn(2, 60, 8), Grid(6, 10), scale=math.inf, selection="none", **settings)
        assert torch.equal(first.weights, again.weights)
        assert (first.weights.sum(dim=-2) == 1).all()
        assert (first.weights.sum(dim=-1) >= 1).all()


@pytest.mark.parametrize("scale", [10.0, math.inf])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_part_of_the_tokens_at_a_time_gives_the_same(settings, scale, monkeypatch):
    tokens, settings = torch.randn(2, 60, 8), settings | {"selection": "strided"}
    whole = selected(tokens, Grid(6, 10), scale=scale, **settings)
    for module in (ops, ops.reference):
        monkeypatch.setattr(module, "tokens_at_once", lambda batch, count: 7)
    parts = selected(tokens, Grid(6, 10), scale=scale, **settings)
    torch.testing.assert_close(parts.weights, whole.weights)
    torch.testing.assert_close(parts.merge(tokens), whole.merge(tokens))


def test_the_similarities_of_a_part_stay_within_32_mebibytes():
    for batch, count in ((2, 3072), (1, 2048), (16, 8192), (4096, 65536)):
        part = ops.tokens_at_once(batch, count)
        assert part >= 1
        assert part == 1 or batch * count * part * 4 <= 32 * 2**20


class TestSlice:
    def test_takes_the_first_and_adds_nothing_to_the_others(self):
        tokens = torch.randn(2, 64, 8)
        plan = selected(tokens, Grid(8, 8), selection="slice", ratio=0.75)
        assert torch.equal(plan.merge(tokens), tokens[:, :16])
        residual = torch.randn(2, 64, 8)
        result = plan.unmerge(plan.merge(tokens), residual)
        assert torch.equal(result[:, :16], residual[:, :16] + tokens[:, :16])
        assert torch.equal(result[:, 16:], residual[:, 16:])
        assert torch.equal(plan.gather(torch.arange(64)), torch.arange(16).expand(2, -1))


@pytest.mark.parametrize("scale", [10.0, math.inf])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("unmerge", ["transpose", "pseudo-inverse"])
def test_a_residual_is_added(settings, scale, unmerge):
    tokens, residual = torch.randn(2, 2, 60, 8)
    plan = selected(tokens, Grid(6, 10), scale=scale, unmerge=unmerge, **settings)
    merged = plan.merge(tokens)
    torch.testing.assert_close(plan.unmerge(merged, residual), residual + plan.unmerge(merged))
    with pytest.raises(ValueError, match="tokens have shape"):
        plan.unmerge(merged, merged)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scale", [10.0, math.inf])
@pytest.mark.parametrize("asking", ["merged", "residual"])
def test_gradients_flow_whoever_asks_for_them(asking, scale, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    plan = selected(torch.randn(1, 64, 8), Grid(8, 8), scale=scale, backend=backend)
    tensors = {"merged": torch.randn(1, plan.num_destinations, 8), "residual": torch.randn(1, 64, 8)}
    tensors[asking].requires_grad_()
    plan.unmerge(**tensors).sum().backward()
    assert tensors[asking].grad.abs().sum() > 0


def test_a_residual_of_another_precision_is_not_rounded():
    pytest.importorskip("triton")
    tokens = torch.randn(1, 64, 8).half()
    plan = selected(tokens, Grid(8, 8), backend="triton")
    assert plan.unmerge(plan.merge(tokens), torch.randn(1, 64, 8)).dtype == torch.float32


@pytest.mark.parametrize(("num_regions", "ratio"), [(16, 0.25), (16, 0.5), (16, 0.75), (4, 0.5)])
def test_sums_written_out_for_the_compiler_are_the_same(num_regions, ratio):
    """Regions of 4 tokens are written out, those of 16 are not."""
    torch.compiler.reset()  # or the cases after the first would be compiled for any size, which takes longer
    tokens = torch.randn(2, 64, 8)
    plan = MergePlan(Grid(8, 8), ToMAConfig(ratio=ratio, num_regions=num_regions, scale=10.0), batch_size=2)
    plan.update(tokens, Action.SELECT)

    def there_and_back(x):
        return plan.unmerge(plan.merge(x).tanh(), residual=x)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), there_and_back(tokens))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here, see tests/gpu")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("scale", [10.0, math.inf])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_plan_of_kernels_does_what_a_plan_of_torch_does(settings, scale, joint):
    pytest.importorskip("triton")
    tokens = torch.randn(2, 64, 12)
    plans = [
        MergePlan(
            Grid(8, 8), ToMAConfig(num_regions=4, scale=scale, backend=name, **settings), batch_size=2, joint=joint
        )
        for name in ("torch", "triton")
    ]
    for plan in plans:
        plan.update(tokens, Action.SELECT)
    ours = plans[1]
    region = torch.empty(64, dtype=torch.int64)
    region[ours.regions.split(torch.arange(64)[None, :, None]).flatten()] = torch.arange(4).repeat_interleave(16)
    similarity = ops.cosine_similarity(tokens).masked_fill(region[:, None] != region[None, :], -1.0)
    reached = [ops.facility_location_value(similarity, plan.positions)[:, -1].sum() for plan in plans]
    torch.testing.assert_close(reached[0], reached[1], rtol=1e-3, atol=0)  # ties may be broken the other way

    theirs = plans[0]
    ours.destinations.copy_(theirs.destinations)
    ours.update(tokens, Action.REWEIGH)
    torch.testing.assert_close(ours.weights, theirs.weights)
    merged = theirs.merge(tokens)
    torch.testing.assert_close(ours.merge(tokens), merged)
    torch.testing.assert_close(ours.unmerge(merged, tokens), theirs.unmerge(merged, tokens))
