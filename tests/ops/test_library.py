"""The operators as torch sees them: fake implementations, whole-graph compilation, gradients, autocast."""

import pytest
import torch

from toma_diffusion.ops import cosine_similarity, facility_location, merge, merge_weights, reference, unmerge

ops = torch.ops.toma_diffusion
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")


def there_and_back(tokens):
    destinations = facility_location(cosine_similarity(tokens), tokens.shape[1] // 2)
    weights = merge_weights(tokens, destinations, 1000.0)
    return unmerge(merge(tokens, weights) * 2, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_operators_are_well_formed(dtype):
    tokens = torch.randn(3, 10, 6).to(dtype)
    similarity = cosine_similarity(tokens)
    destinations = facility_location(similarity, 4)
    for operator, arguments in (
        (ops.cosine_similarity, (tokens,)),
        (ops.facility_location, (similarity, 4)),
        (ops.merge_weights, (tokens, destinations, 50.0)),
        (ops.nearest_destinations, (tokens, destinations)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(dynamic):
    tokens = torch.randn(2, 16, 8)
    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), there_and_back(tokens))


@pytest.mark.parametrize("spread", [unmerge, reference.unmerge_by_pseudo_inverse])
def test_gradients_flow_through_merge_and_unmerge(spread):
    """As linear maps with constant weights; checked against finite differences."""
    tokens = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    weights = merge_weights(tokens, torch.tensor([[0, 2, 5]]), 5.0)
    assert not weights.requires_grad
    assert torch.autograd.gradcheck(lambda x: spread(merge(x, weights), weights), (tokens,))


class TestAutocast:
    """Traps, number 9: autocast would compute similarities in half precision, and other tokens would be picked."""

    def test_results_are_those_without(self):
        tokens = torch.randn(2, 64, 32)

        def results():
            similarity = cosine_similarity(tokens)
            picks = facility_location(similarity, 32)
            weights = merge_weights(tokens, picks, 1000.0)
            nearest = ops.nearest_destinations(tokens, picks)
            merged = merge(tokens, weights)
            spread = [unmerge(merged, weights), reference.unmerge_by_pseudo_inverse(merged, weights)]
            return [similarity, picks, weights, nearest, merged, *spread]

        expected = results()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = results()
            assert (tokens @ tokens.mT).dtype == torch.bfloat16
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_also_in_compiled_code(self, backend):
        tokens = torch.randn(2, 16, 8)
        compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(compiled(tokens), there_and_back(tokens))
        assert torch.equal(compiled(tokens), there_and_back(tokens))
