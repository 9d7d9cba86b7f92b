"""merge_weights, merge and unmerge: the identities of the method, and its limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion.ops import cosine_similarity, facility_location, merge, merge_weights, unmerge

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HARD = 1e6  # a scale at which the softmax is 0/1
METHODS = ["transpose", "pseudo-inverse"]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def weights_of(tokens: torch.Tensor, num_select: int, scale: float = 1000.0) -> tuple[torch.Tensor, torch.Tensor]:
    destinations = facility_location(cosine_similarity(tokens), num_select)
    return destinations, merge_weights(tokens, destinations, scale)


def clusters(num_clusters: int = 6, members: int = 4, width: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens around orthogonal centres, shuffled, and the cluster of each."""
    label = torch.arange(num_clusters).repeat_interleave(members)[torch.randperm(num_clusters * members)]
    return (torch.eye(width)[label] + 0.05 * torch.rand(len(label), width))[None], label


@st.composite
def token_batches(draw):
    batch, size, width = draw(st.integers(1, 4)), draw(st.integers(1, 24)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tokens = torch.randn(batch, size, width, generator=generator).to(draw(st.sampled_from(DTYPES)))
    return tokens, draw(st.integers(1, size)), draw(st.sampled_from([1.0, 30.0, 1000.0]))


class TestWeights:
    @given(token_batches())
    def test_columns_sum_to_one(self, case):
        tokens, num_select, scale = case
        _, weights = weights_of(tokens, num_select, scale)
        assert weights.dtype == tokens.dtype
        assert (weights >= 0).all()
        torch.testing.assert_close(
            weights.float().sum(dim=-2),
            torch.ones(tokens.shape[:2]),
            atol=num_select * torch.finfo(tokens.dtype).eps,
            rtol=0,
        )

    @given(token_batches())
    def test_rows_of_the_merge_matrix_sum_to_one(self, case):
        """Merging a constant gives that constant."""
        tokens, num_select, scale = case
        _, weights = weights_of(tokens, num_select, scale)
        merged = merge(torch.ones_like(tokens), weights)
        torch.testing.assert_close(merged, torch.ones_like(merged), atol=tolerance(tokens.dtype), rtol=0)

    def test_formula(self):
        """softmax over destinations of scale · cos, written out for each pair."""
        tokens = torch.randn(1, 7, 5, dtype=torch.float64)
        destinations = torch.tensor([[4, 0, 6]])
        cosine = [[torch.cosine_similarity(tokens[0, d], tokens[0, i], dim=0) for i in range(7)] for d in (4, 0, 6)]
        exponential = (13.0 * torch.tensor(cosine, dtype=torch.float64)).exp()
        expected = exponential / exponential.sum(dim=0)
        torch.testing.assert_close(merge_weights(tokens, destinations, 13.0)[0], expected)

    def test_lower_scale_blends_more(self):
        tokens = torch.randn(1, 20, 8)
        destinations, _ = weights_of(tokens, 6)
        largest = [merge_weights(tokens, destinations, scale).amax(dim=-2).mean() for scale in (1.0, 10.0, 100.0)]
        assert largest == sorted(largest)


class TestHardLimit:
    def test_merge_is_the_cluster_mean_and_unmerge_the_copy(self):
        tokens, label = clusters()
        destinations, weights = weights_of(tokens, 6, HARD)
        assert set(weights.unique().tolist()) == {0.0, 1.0}
        chosen = label[destinations[0]]
        values = torch.randn(1, 24, 3)
        means = torch.stack([values[0, label == cluster].mean(dim=0) for cluster in chosen])
        torch.testing.assert_close(merge(values, weights)[0], means)

        results = torch.randn(1, 6, 3)
        copies = torch.stack([results[0, (chosen == cluster).nonzero()[0, 0]] for cluster in label])
        assert torch.equal(unmerge(results, weights)[0], copies)

    def test_pseudo_inverse_equals_transpose(self):
        tokens, _ = clusters()
        _, weights = weights_of(tokens, 6, HARD)
        merged = torch.randn(1, 6, 3)
        torch.testing.assert_close(unmerge(merged, weights, "pseudo-inverse"), unmerge(merged, weights))


class TestUnmerge:
    def test_pseudo_inverse_inverts_the_merge(self):
        """M M⁺ = 1 when destinations are independent; against torch's SVD pseudo-inverse of M."""
        tokens = torch.randn(2, 12, 6, dtype=torch.float64)
        _, weights = weights_of(tokens, 5, 8.0)
        merged = torch.randn(2, 5, 4, dtype=torch.float64)
        spread = unmerge(merged, weights, "pseudo-inverse")
        torch.testing.assert_close(merge(spread, weights), merged)
        matrix = weights / weights.sum(dim=-1, keepdim=True)
        torch.testing.assert_close(spread, torch.linalg.pinv(matrix) @ merged)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_identical_tokens_come_back(self, method, dtype):
        """Also where the destinations coincide, and M Mᵀ is singular."""
        tokens = torch.randn(1, 1, 8).expand(2, 10, 8).to(dtype)
        _, weights = weights_of(tokens, 4)
        back = unmerge(merge(tokens, weights), weights, method)
        torch.testing.assert_close(back, tokens, atol=tolerance(dtype), rtol=tolerance(dtype))

    @given(token_batches())
    def test_transpose_is_a_mean(self, case):
        """Weights sum to 1, so outputs neither shrink with the cluster size nor leave the range of the inputs."""
        tokens, num_select, scale = case
        _, weights = weights_of(tokens, num_select, scale)
        merged = merge(tokens, weights)
        spread = unmerge(merged, weights)
        assert spread.shape == tokens.shape
        assert spread.dtype == tokens.dtype
        slack = 8 * tolerance(tokens.dtype)
        assert (spread.float() <= merged.float().amax(dim=1, keepdim=True) + slack).all()
        assert (spread.float() >= merged.float().amin(dim=1, keepdim=True) - slack).all()

    def test_unknown_method(self):
        with pytest.raises(ValueError, match="method='inverse' is not known"):
            unmerge(torch.ones(1, 2, 3), torch.ones(1, 2, 4), "inverse")


class TestLimits:
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num_select", [1, 6])
    def test_zeros(self, method, dtype, num_select):
        tokens = torch.zeros(1, 6, 4, dtype=dtype)
        _, weights = weights_of(tokens, num_select)
        assert torch.equal(unmerge(merge(tokens, weights), weights, method), tokens)

    @pytest.mark.parametrize("method", METHODS)
    def test_huge_half_precision(self, method):
        """Sums of 60000s pass half precision's limit of 65504: means must be formed without them."""
        tokens = torch.full((1, 16, 640), 60000.0, dtype=torch.float16)
        _, weights = weights_of(tokens, 4)
        back = unmerge(merge(tokens, weights), weights, method)
        torch.testing.assert_close(back.float(), tokens.float(), rtol=2e-3, atol=0)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token(self, dtype):
        tokens = torch.randn(3, 1, 5).to(dtype)
        _, weights = weights_of(tokens, 1)
        assert torch.equal(unmerge(merge(tokens, weights), weights), tokens)

    def test_one_destination_is_the_mean(self):
        tokens = torch.randn(2, 9, 5)
        _, weights = weights_of(tokens, 1)
        torch.testing.assert_close(merge(tokens, weights), tokens.mean(dim=1, keepdim=True))

    def test_all_destinations_is_a_permutation(self):
        tokens = torch.randn(1, 12, 64)
        destinations, weights = weights_of(tokens, 12, HARD)
        assert torch.equal(merge(tokens, weights), tokens[:, destinations[0]])
        assert torch.equal(unmerge(merge(tokens, weights), weights), tokens)

    def test_absurd_scale_leaves_no_infinity(self):
        """Parallel tokens and a scale far beyond float32: rounding may empty a row, which must not divide by zero."""
        tokens = torch.rand(4, 32, 1) * torch.rand(1, 1, 7)
        _, weights = weights_of(tokens, 16, 1e12)
        assert unmerge(merge(tokens, weights), weights).isfinite().all()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_not_a_number_raises_nothing(self, bad, dtype):
        tokens = torch.randn(2, 12, 4).to(dtype)
        tokens[0, 3, 1] = bad
        _, weights = weights_of(tokens, 5)
        clean = tokens[1:]
        _, clean_weights = weights_of(clean, 5)
        spread = unmerge(merge(tokens, weights), weights)
        assert torch.equal(spread[1:], unmerge(merge(clean, clean_weights), clean_weights))


class TestErrors:
    def test_shapes_are_quoted(self):
        weights = torch.ones(2, 3, 8)
        with pytest.raises(ValueError, match=r"tokens has shape \[2, 9, 4\]; it must be \[2, 8, width\]"):
            merge(torch.ones(2, 9, 4), weights)
        with pytest.raises(ValueError, match=r"merged has shape \[1, 3, 4\]; it must be \[2, 3, width\]"):
            unmerge(torch.ones(1, 3, 4), weights)
        with pytest.raises(ValueError, match=r"destinations has shape \[3, 2\]"):
            merge_weights(torch.ones(2, 8, 4), torch.zeros(3, 2, dtype=torch.int64), 1.0)
