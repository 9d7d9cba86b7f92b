"""Soft and hard assignment; the same by kernels and in compiled code; and what is said to have run."""

import math

import pytest
import torch
from merging import SteadyPlan
from pairs import pairwise

from toma_diffusion import Merge, ops
from toma_diffusion.merge import Action, Grid, MergePlan
from toma_diffusion.ops import backend as backends

SETTINGS = [
    {"num_regions": 4},
    {"num_regions": 4, "assign": "global"},
    {"num_regions": 4, "region": "stripe"},
    {"region": "global", "selection_tokens": 16},
]
SCALES = [10.0, math.inf]
OPERATOR_OF = {
    "_select_in_registers": "selection",
    "_select_from_memory": "selection",
    "_weigh": "weights",
    "_merge": "merging",
    "_merge_members": "merging",
    "_unmerge": "unmerging",
}
"""By the names of the kernels."""
every_setting = pytest.mark.parametrize("settings", SETTINGS)


def selected(tokens, grid, plan_class=MergePlan, joint=False, **settings):
    plan = plan_class(grid, Merge(**settings), batch_size=len(tokens), dtype=tokens.dtype, joint=joint)
    plan.update(tokens, Action.SELECT)
    return plan


@every_setting
class TestHard:
    def test_is_the_limit_of_soft(self, settings):
        tokens = torch.randn(2, 60, 32)
        soft, hard = (selected(tokens, Grid(6, 10), SteadyPlan, scale=each, **settings) for each in (1e7, math.inf))
        torch.testing.assert_close(hard.weights, soft.weights)
        torch.testing.assert_close(hard.merge(tokens), soft.merge(tokens))
        torch.testing.assert_close(hard.unmerge(hard.merge(tokens)), soft.unmerge(soft.merge(tokens)))

    def test_merges_as_its_matrix_says(self, settings):
        tokens = torch.randn(3, 60, 8)
        plan = selected(tokens, Grid(6, 10), scale=math.inf, ratio=0.75, **settings)
        assert ((plan.weights == 0) | (plan.weights == 1)).all()
        expected = ops.merge(plan.assign_regions.split(tokens), plan.weights).reshape(3, plan.num_destinations, 8)
        torch.testing.assert_close(plan.merge(tokens), expected)

    def test_no_destination_is_empty_even_among_equals(self, settings):
        plan = selected(torch.ones(2, 60, 8), Grid(6, 10), scale=math.inf, **settings)
        rows = plan.assignment.targets.gather(1, plan.positions)
        assert torch.equal(rows, torch.arange(plan.num_destinations).expand(2, -1))

    def test_gradient(self, settings):
        plan = selected(torch.randn(1, 60, 4), Grid(6, 10), scale=math.inf, **settings)
        tokens = torch.randn(1, 60, 4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: plan.unmerge(plan.merge(x)), (tokens,))


@pytest.mark.parametrize("scale", SCALES)
@every_setting
def test_a_part_of_the_tokens_at_a_time_gives_the_same(settings, scale, monkeypatch):
    tokens = torch.randn(2, 60, 8)
    whole = selected(tokens, Grid(6, 10), SteadyPlan, scale=scale, **settings)
    monkeypatch.setattr(ops, "tokens_at_once", lambda batch, count: 7)
    parts = selected(tokens, Grid(6, 10), SteadyPlan, scale=scale, **settings)
    torch.testing.assert_close(parts.weights, whole.weights)
    torch.testing.assert_close(parts.merge(tokens), whole.merge(tokens))


def test_the_similarities_of_a_part_stay_within_32_mebibytes():
    for batch, count in ((2, 3072), (1, 2048), (16, 8192), (4096, 65536)):
        part = ops.tokens_at_once(batch, count)
        assert part == 1 or (part > 1 and batch * count * part * 4 <= 32 * 2**20)


@pytest.mark.parametrize("scale", SCALES)
@every_setting
def test_a_residual_is_added(settings, scale):
    tokens, residual = torch.randn(2, 2, 60, 8)
    plan = selected(tokens, Grid(6, 10), scale=scale, **settings)
    merged = plan.merge(tokens)
    torch.testing.assert_close(plan.unmerge(merged, residual), residual + plan.unmerge(merged))
    with pytest.raises(ValueError, match="tokens have shape"):
        plan.unmerge(merged, merged)


@pytest.mark.parametrize(("num_regions", "ratio"), [(16, 0.25), (16, 0.75), (4, 0.5)])
def test_sums_written_out_for_the_compiler_are_the_same(num_regions, ratio):
    """Regions of 4 tokens are written out, those of 16 are not."""
    torch.compiler.reset()  # or the cases after the first would be compiled for any size, which takes longer
    tokens = torch.randn(2, 64, 8)
    plan = selected(tokens, Grid(8, 8), ratio=ratio, num_regions=num_regions, scale=10.0)

    def there_and_back(x):
        return plan.unmerge(plan.merge(x).tanh(), residual=x)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens), there_and_back(tokens))


class TestKernels:
    @pytest.fixture(autouse=True)
    def _triton(self):
        pytest.importorskip("triton")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here, see tests/gpu")
    @pytest.mark.parametrize(("settings", "scale", "joint"), pairwise(SETTINGS, SCALES, (False, True)))
    def test_a_plan_of_kernels_does_what_a_plan_of_torch_does(self, settings, scale, joint):
        tokens, grid = torch.randn(2, 64, 12), Grid(8, 8)
        theirs, ours = (
            selected(tokens, grid, joint=joint, scale=scale, backend=name, **settings) for name in ("torch", "triton")
        )
        region = theirs.regions.join(torch.arange(4).repeat_interleave(16)[:, None])[0, :, 0]
        similarity = ops.cosine_similarity(tokens).masked_fill(region[:, None] != region[None, :], -1.0)
        reached = [ops.facility_location_value(similarity, plan.positions)[:, -1].sum() for plan in (theirs, ours)]
        torch.testing.assert_close(*reached, rtol=1e-3, atol=0)  # ties may be broken the other way
        ours.destinations.copy_(theirs.destinations)
        ours.update(tokens, Action.REWEIGH)
        torch.testing.assert_close(ours.weights, theirs.weights)
        merged = theirs.merge(tokens)
        torch.testing.assert_close(ours.merge(tokens), merged)
        torch.testing.assert_close(ours.unmerge(merged, tokens), theirs.unmerge(merged, tokens))

    def test_a_residual_of_another_precision_is_not_rounded(self):
        tokens = torch.randn(1, 64, 8).half()
        plan = selected(tokens, Grid(8, 8), backend="triton")
        assert plan.unmerge(plan.merge(tokens), torch.randn(1, 64, 8)).dtype == torch.float32

    @pytest.mark.parametrize(("backend", "scale"), pairwise(["torch", "triton"], SCALES))
    @pytest.mark.parametrize("asking", ["merged", "residual"])
    def test_gradients_flow_whoever_asks_for_them(self, asking, scale, backend):
        plan = selected(torch.randn(1, 64, 8), Grid(8, 8), scale=scale, backend=backend)
        tensors = {"merged": torch.randn(1, plan.num_destinations, 8), "residual": torch.randn(1, 64, 8)}
        tensors[asking].requires_grad_()
        plan.unmerge(**tensors).sum().backward()
        assert tensors[asking].grad.abs().sum() > 0


class TestReportedBackends:
    """`plan.backends`, which `summary()` shows, names what really ran."""

    @pytest.fixture
    def launched(self, monkeypatch):
        """The operators whose kernels were started."""
        pytest.importorskip("triton")
        from toma_diffusion.ops import triton_facility_location, triton_merge, triton_weights

        started = set()
        for module in (triton_facility_location, triton_merge, triton_weights):

            def launch(kernel, *args, launch=module.launch, **kwargs):
                started.add(OPERATOR_OF.get(kernel.__name__))
                return launch(kernel, *args, **kwargs)

            monkeypatch.setattr(module, "launch", launch)
        return started

    def run(self, plan, tokens, launched):
        launched.clear()
        plan.update(tokens.detach(), Action.SELECT)
        result = plan.unmerge(plan.merge(tokens), tokens)
        assert plan.backends.keys() == {"selection", "weights", "merging", "unmerging"}
        said = {operator for operator, backend in plan.backends.items() if backend.name == "triton"}
        assert said == launched - {None}
        return result

    @pytest.mark.parametrize(
        ("settings", "scale", "joint", "limit", "gradients"),
        pairwise(
            SETTINGS,
            SCALES,
            (False, True),
            (None, "LARGEST_SELECTED", "LARGEST_WEIGHED", "MOST_WEIGHTS"),
            (False, True),
        ),
    )
    def test_are_those_that_ran(self, settings, scale, joint, limit, gradients, launched, monkeypatch):
        if limit is not None:
            monkeypatch.setattr(backends, limit, 8)
        tokens = torch.randn(2, 64, 12, requires_grad=gradients)
        plan = MergePlan(Grid(8, 8), Merge(backend="triton", scale=scale, **settings), batch_size=2, joint=joint)
        self.run(plan, tokens, launched)
        assert all(bool(backend.reason) == (backend.name == "torch") for backend in plan.backends.values())

    def test_without_kernels_there_is_no_reason(self):
        plan = selected(torch.randn(1, 64, 8), Grid(8, 8), num_regions=4)
        assert set(plan.backends.values()) == {("torch", "")}
