"""The selection kernels against the reference. Cosines tie by nature, so the value reached is compared there."""

import pytest
import torch
from kernel_cases import DEVICE, every_case, every_dtype, tokens_and_regions

from toma_diffusion.ops import cosine_similarity, facility_location, facility_location_value
from toma_diffusion.ops.backend import LARGEST_SELECTED

kernels = pytest.importorskip("toma_diffusion.ops.triton_facility_location")


def assert_greedy(similarity, picks, gain_scale=1.0):
    """Every pick has the largest gain that was left to it, but for rounding."""
    coverage = torch.full_like(similarity[:, 0], -1.0)  # [G, m]
    for pick in picks.T:
        gains = gain_scale * (similarity - coverage[:, None]).clamp_min(0).sum(dim=-1)
        rows = torch.arange(len(pick), device=pick.device)
        assert (gains[rows, pick] >= gains.amax(dim=-1) - 1e-4).all()
        coverage = torch.maximum(coverage, similarity[rows, pick])


@every_case
@every_dtype
def test_every_pick_is_greedy_and_none_is_picked_twice(case, dtype):
    tokens, regions = tokens_and_regions(case, dtype)
    if regions.size > LARGEST_SELECTED:
        pytest.skip("too large for registers")
    similarity = cosine_similarity(regions.split(tokens))
    count = max(1, regions.size // 2)
    picks = kernels.select(tokens, count, regions.tiling)
    assert picks.shape == (len(similarity), count)
    assert all(len(set(row)) == count for row in picks.tolist())
    assert_greedy(similarity, picks)
    reached, wanted = (
        facility_location_value(similarity, each)[:, -1].mean()
        for each in (picks, facility_location(similarity, count))
    )
    torch.testing.assert_close(reached, wanted, rtol=5e-3, atol=1e-3)


@every_case
def test_gains_are_multiplied_by_what_is_favoured(case):
    tokens, regions = tokens_and_regions(case, torch.float32)
    if regions.size > LARGEST_SELECTED:
        pytest.skip("too large for registers")
    similarity = cosine_similarity(regions.split(tokens))
    gain_scale = torch.rand(similarity.shape[:2], device=DEVICE) + 0.1
    picks = kernels.select(tokens, max(1, regions.size // 2), regions.tiling, gain_scale)
    assert all(len(set(row)) == picks.shape[1] for row in picks.tolist())
    assert_greedy(similarity, picks, gain_scale)


@pytest.mark.parametrize("is_favoured", [False, True])
@pytest.mark.parametrize(("groups", "candidates", "tokens", "count"), [(3, 20, 20, 20), (1, 9, 40, 5), (2, 33, 7, 12)])
def test_picks_equal_the_reference_where_nothing_ties(groups, candidates, tokens, count, is_favoured):
    similarity = torch.rand(groups, candidates, tokens, device=DEVICE) * 2 - 1
    gain_scale = torch.rand(groups, candidates, device=DEVICE) + 0.1 if is_favoured else None
    expected = facility_location(similarity, count, gain_scale)
    assert torch.equal(kernels.select_from_similarity(similarity.clone(), count, gain_scale), expected)


def test_clusters_are_found():
    """Four bundles of four directions in a tile of sixteen: one destination in each."""
    centres = torch.eye(8, device=DEVICE)[:4].repeat_interleave(4, dim=0)
    tokens = (centres + 0.01 * torch.randn(16, 8, device=DEVICE))[None]
    picks = kernels.select(tokens, 4, (4, 4, 4))
    assert sorted(picks[0].tolist()[i] // 4 for i in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf")])
def test_equal_and_bad_tokens_give_distinct_indices_in_bounds(value):
    tokens = torch.full((1, 24, 8), value, device=DEVICE)
    for picks in (
        kernels.select(tokens, 9, (24, 1, 12)),
        kernels.select_from_similarity(cosine_similarity(tokens.view(2, 12, 8)), 9),
    ):
        assert picks.shape == (2, 9)
        assert all(len(set(row)) == 9 and 0 <= min(row) <= max(row) < 12 for row in picks.tolist())
