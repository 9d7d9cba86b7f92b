"""merge_weights, merge and unmerge: the identities of the method, and its limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion.ops import cosine_similarity, facility_location, merge, merge_weights, unmerge
from toma_diffusion.ops.reference import unmerge_by_pseudo_inverse

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HARD = 1e6
"""A scale at which the softmax is 0/1."""
every_unmerge = pytest.mark.parametrize("spread", [unmerge, unmerge_by_pseudo_inverse])


def weights_of(tokens: torch.Tensor, count: int, scale: float = 1000.0) -> tuple[torch.Tensor, torch.Tensor]:
    destinations = facility_location(cosine_similarity(tokens), count)
    return destinations, merge_weights(tokens, destinations, scale)


@st.composite
def token_batches(draw):
    batch, size, width = draw(st.integers(1, 4)), draw(st.integers(1, 24)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tokens = torch.randn(batch, size, width, generator=generator).to(draw(st.sampled_from(DTYPES)))
    return tokens, draw(st.integers(1, size)), draw(st.sampled_from([1.0, 30.0, 1000.0]))


@given(token_batches())
def test_columns_sum_to_one_and_rows_of_the_merge_matrix_too(case):
    """So a constant merges into itself."""
    tokens, count, scale = case
    _, weights = weights_of(tokens, count, scale)
    assert weights.dtype == tokens.dtype
    assert (weights >= 0).all()
    sums, slack = weights.float().sum(dim=-2), count * torch.finfo(tokens.dtype).eps
    torch.testing.assert_close(sums, torch.ones(tokens.shape[:2]), atol=slack, rtol=0)
    merged = merge(torch.ones_like(tokens), weights)
    torch.testing.assert_close(merged, torch.ones_like(merged), atol=TOLERANCE[tokens.dtype], rtol=0)


@given(token_batches())
def test_transpose_is_a_mean(case):
    """Weights sum to 1, so outputs neither shrink with the cluster size nor leave the range of the inputs."""
    tokens, count, scale = case
    _, weights = weights_of(tokens, count, scale)
    merged = merge(tokens, weights)
    spread = unmerge(merged, weights)
    assert (spread.shape, spread.dtype) == (tokens.shape, tokens.dtype)
    slack = 8 * TOLERANCE[tokens.dtype]
    assert (spread.float() <= merged.float().amax(dim=1, keepdim=True) + slack).all()
    assert (spread.float() >= merged.float().amin(dim=1, keepdim=True) - slack).all()


def test_in_the_hard_limit_merging_is_the_mean_of_a_cluster_and_unmerging_the_copy():
    label = torch.arange(6).repeat_interleave(4)[torch.randperm(24)]
    tokens = (torch.eye(16)[label] + 0.05 * torch.rand(24, 16))[None]  # around orthogonal centres
    destinations, weights = weights_of(tokens, 6, HARD)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    chosen, values = label[destinations[0]], torch.randn(1, 24, 3)
    means = torch.stack([values[0, label == cluster].mean(dim=0) for cluster in chosen])
    torch.testing.assert_close(merge(values, weights)[0], means)
    results = torch.randn(1, 6, 3)
    copies = torch.stack([results[0, (chosen == cluster).nonzero()[0, 0]] for cluster in label])
    assert torch.equal(unmerge(results, weights)[0], copies)
    torch.testing.assert_close(unmerge_by_pseudo_inverse(results, weights)[0], copies)


def test_the_pseudo_inverse_inverts_the_merge():
    """M M⁺ = 1 when destinations are independent; against torch's SVD pseudo-inverse of M."""
    _, weights = weights_of(torch.randn(2, 12, 6, dtype=torch.float64), 5, 8.0)
    merged = torch.randn(2, 5, 4, dtype=torch.float64)
    spread = unmerge_by_pseudo_inverse(merged, weights)
    torch.testing.assert_close(merge(spread, weights), merged)
    torch.testing.assert_close(spread, torch.linalg.pinv(weights / weights.sum(dim=-1, keepdim=True)) @ merged)


class TestLimits:
    @every_unmerge
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_identical_tokens_come_back(self, spread, dtype, value):
        """Also where the destinations coincide, and M Mᵀ is singular."""
        tokens = (value * torch.randn(1, 1, 8)).expand(2, 10, 8).to(dtype)
        _, weights = weights_of(tokens, 4)
        back = spread(merge(tokens, weights), weights)
        torch.testing.assert_close(back, tokens, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    @every_unmerge
    def test_huge_half_precision(self, spread):
        """Sums of 60000s pass half precision's limit of 65504: means must be formed without them."""
        tokens = torch.full((1, 16, 640), 60000.0, dtype=torch.float16)
        _, weights = weights_of(tokens, 4)
        torch.testing.assert_close(spread(merge(tokens, weights), weights).float(), tokens.float(), rtol=2e-3, atol=0)

    def test_one_destination_is_the_mean_and_all_are_a_permutation(self):
        tokens = torch.randn(1, 12, 64)
        _, weights = weights_of(tokens, 1)
        torch.testing.assert_close(merge(tokens, weights), tokens.mean(dim=1, keepdim=True))
        destinations, weights = weights_of(tokens, 12, HARD)
        assert torch.equal(merge(tokens, weights), tokens[:, destinations[0]])
        assert torch.equal(unmerge(merge(tokens, weights), weights), tokens)

    def test_an_absurd_scale_leaves_no_infinity(self):
        """Parallel tokens and a scale far beyond float32: rounding may empty a row, which must not divide by zero."""
        tokens = torch.rand(4, 32, 1) * torch.rand(1, 1, 7)
        _, weights = weights_of(tokens, 16, 1e12)
        assert unmerge(merge(tokens, weights), weights).isfinite().all()

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_not_a_number_stays_in_its_sample(self, bad, dtype):
        tokens = torch.randn(2, 12, 4).to(dtype)
        tokens[0, 3, 1] = bad
        _, weights = weights_of(tokens, 5)
        _, clean = weights_of(tokens[1:], 5)
        spread = unmerge(merge(tokens, weights), weights)
        assert torch.equal(spread[1:], unmerge(merge(tokens[1:], clean), clean))


def test_wrong_shapes_are_quoted():
    weights = torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 9, 4\]; it must be \[2, 8, width\]"):
        merge(torch.ones(2, 9, 4), weights)
    with pytest.raises(ValueError, match=r"merged has shape \[1, 3, 4\]; it must be \[2, 3, width\]"):
        unmerge(torch.ones(1, 3, 4), weights)
    with pytest.raises(ValueError, match=r"destinations has shape \[3, 2\]"):
        merge_weights(torch.ones(2, 8, 4), torch.zeros(3, 2, dtype=torch.int64), 1.0)
