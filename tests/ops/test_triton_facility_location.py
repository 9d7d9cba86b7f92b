"""The selection kernels against the reference. Cosines tie by nature, so the value reached is compared there."""

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, pairs_of_cases, tokens_and_regions

from toma_diffusion.ops import LEAST_COSINE, cosine_similarity, facility_location, facility_location_value
from toma_diffusion.ops.backend import LARGEST_SELECTED
from toma_diffusion.ops.tiles import Tiling

kernels = pytest.importorskip("toma_diffusion.ops.triton_facility_location")

PLACES = ("registers", "memory")
"""Where the kernels keep the similarity: small regions are tried in memory too."""


@pytest.fixture
def keep_in(monkeypatch):
    def keep(where: str) -> None:
        if where == "memory":
            monkeypatch.setattr(kernels, "LARGEST_IN_REGISTERS", 0)

    return keep


def assert_greedy(similarity, picks, least=LEAST_COSINE):
    """Every pick has the largest gain that was left to it, but for rounding."""
    coverage = torch.full_like(similarity[:, 0], least)  # [G, m]
    for pick in picks.T:
        gains = (similarity - coverage[:, None]).clamp_min(0).sum(dim=-1)
        rows = torch.arange(len(pick), device=pick.device)
        assert (gains[rows, pick] >= gains.amax(dim=-1) - 1e-4).all()
        coverage = torch.maximum(coverage, similarity[rows, pick])


def assert_distinct(picks, count, size):
    assert picks.shape[1] == count
    assert all(len(set(row)) == count and 0 <= min(row) <= max(row) < size for row in picks.tolist())


def expected_similarity(tokens, regions, weight, parts):
    """Written out: the mean cosine, minus the squared distances in sides and in depths of a region."""
    cosines = cosine_similarity(regions.split(tokens)).unflatten(0, (parts, -1)).mean(dim=0)  # [B·R, n, n]
    local = torch.arange(regions.size, device=DEVICE).expand(regions.count, -1)
    place = regions.tiling.positions(local)
    height, width = regions.grid.height, regions.grid.width
    frame, row, column = place // (height * width), place // width % height, place % width
    frames, rows, columns = ((each[:, :, None] - each[:, None]) ** 2 for each in (frame, row, column))
    penalty = weight * ((rows + columns) / (regions.height * regions.width) + frames / regions.depth**2)
    return cosines - penalty.repeat(len(cosines) // regions.count, 1, 1)


@pairs_of_cases("dtype, where, weight, parts", DTYPES, PLACES, [0.0, 0.3, 3.0], [1, 2])
def test_every_pick_is_greedy_and_none_is_picked_twice(case, dtype, where, weight, parts, keep_in):
    """Parts choose together, and distance counts."""
    keep_in(where)
    grid, kind, count, width, batch = case
    tokens, regions = tokens_and_regions((grid, kind, count, width, parts * batch), dtype)
    if regions.size > LARGEST_SELECTED:
        pytest.skip("too large for the kernels")
    similarity = expected_similarity(tokens, regions, weight, parts)
    least = LEAST_COSINE - regions.tiling.largest_penalty(weight)
    count = max(1, regions.size // 2)
    picks = kernels.select(tokens, count, regions.tiling, distance_weight=weight, parts=parts)
    assert len(picks) == batch * regions.count
    assert_distinct(picks, count, regions.size)
    assert_greedy(similarity, picks, least)
    reached, wanted = (
        facility_location_value(similarity, each)[:, -1].mean()
        for each in (picks, facility_location(similarity, count, least))
    )
    torch.testing.assert_close(reached, wanted, rtol=5e-3, atol=2e-3)
    if where == "memory":
        measured = kernels.measure(tokens, regions.tiling, distance_weight=weight, parts=parts)
        torch.testing.assert_close(1 - measured, similarity, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("groups", "candidates", "pictures", "count"), [(3, 20, 1, 20), (1, 9, 4, 5), (2, 70, 1, 35)])
def test_picks_equal_the_reference_where_nothing_ties(groups, candidates, pictures, count):
    similarity = torch.rand(groups, pictures, candidates, candidates, device=DEVICE) * 2 - 1
    similarity = similarity.triu() + similarity.triu(1).mT
    expected = facility_location(similarity.transpose(1, 2).flatten(2), count)
    picks = kernels.select_by_distances(1 - similarity.flatten(1, 2), count)
    assert torch.equal(picks, expected)


@pytest.mark.parametrize("where", PLACES)
def test_rounding_does_not_decide_ties(where, keep_in):
    """Tokens in pairs that differ from each other by rounding alone: the first of each pair is picked."""
    keep_in(where)
    firsts = torch.linalg.qr(torch.randn(16, 16))[0][:8]
    tokens = firsts.repeat_interleave(2, dim=0)
    tokens[1::2] *= 1 + 1e-6 * torch.rand(8, 1)
    picks = kernels.select(tokens[None].to(DEVICE), 8, Tiling(4, 4, 4, 4, 4, 4))
    assert sorted(picks[0].tolist()) == list(range(0, 16, 2))
    assert torch.equal(facility_location(cosine_similarity(tokens[None]), 8).to(DEVICE), picks)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf")])
def test_equal_and_bad_tokens_give_distinct_indices_in_bounds(value):
    tokens = torch.full((1, 24, 8), value, device=DEVICE)
    for picks in (
        kernels.select(tokens, 9, Tiling(24, 1, 12, 1, 24, 1)),
        kernels.select_by_distances(1 - cosine_similarity(tokens.view(2, 12, 8)), 9),
    ):
        assert len(picks) == 2
        assert_distinct(picks, 9, 12)
