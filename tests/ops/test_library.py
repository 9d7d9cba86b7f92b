"""The operators as torch.library sees them: fake implementations, whole-graph compilation, gradients."""

import pytest
import torch

from toma_diffusion.ops import cosine_similarity, facility_location, merge, merge_weights, unmerge

ops = torch.ops.toma_diffusion
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")


def sample(dtype: torch.dtype = torch.float32):
    tokens = torch.randn(3, 10, 6).to(dtype)
    destinations = facility_location(cosine_similarity(tokens), 4)
    return tokens, destinations


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["cosine_similarity", "facility_location", "merge_weights", "nearest_destinations"])
def test_operator_is_well_formed(name, dtype):
    tokens, destinations = sample(dtype)
    operator, arguments = {
        "cosine_similarity": (ops.cosine_similarity, (tokens,)),
        "facility_location": (ops.facility_location, (cosine_similarity(tokens), 4)),
        "merge_weights": (ops.merge_weights, (tokens, destinations, 50.0)),
        "nearest_destinations": (ops.nearest_destinations, (tokens, destinations)),
    }[name]
    torch.library.opcheck(operator.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("method", ["transpose", "pseudo-inverse"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(method, dynamic):
    def pipeline(tokens):
        destinations = facility_location(cosine_similarity(tokens), tokens.shape[1] // 2)
        weights = merge_weights(tokens, destinations, 1000.0)
        return unmerge(merge(tokens, weights) * 2, weights, method)

    tokens = torch.randn(2, 16, 8)
    compiled = torch.compile(pipeline, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), pipeline(tokens))


@pytest.mark.parametrize("method", ["transpose", "pseudo-inverse"])
def test_gradients_flow_through_merge_and_unmerge(method):
    """As linear maps with constant weights; checked against finite differences."""
    tokens = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    weights = merge_weights(tokens, torch.tensor([[0, 2, 5]]), 5.0)
    assert not weights.requires_grad
    assert torch.autograd.gradcheck(lambda x: unmerge(merge(x, weights), weights, method), (tokens,))
