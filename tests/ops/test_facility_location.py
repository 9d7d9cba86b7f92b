"""Picks and gains against independent truth: apricot, and a brute force in float64."""

import math

import numpy as np
import pytest
import torch
from apricot import FacilityLocationSelection
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion.ops import cosine_similarity, facility_location, facility_location_value
from toma_diffusion.ops.reference import TIE

CASES = [(seed, size, count) for size, count in [(5, 2), (12, 12), (33, 8), (64, 32), (100, 25)] for seed in range(4)]


def random_similarity(seed: int, size: int) -> np.ndarray:
    """Non-negative, symmetric, float64, and without the ties of cosines."""
    matrix = np.random.default_rng(seed).random((size, size))
    return (matrix + matrix.T) / 2


def value(similarity: np.ndarray, chosen: list[int]) -> float:
    """f(T), by its definition."""
    return float(similarity[chosen].max(axis=0).sum())


def brute_force(similarity: np.ndarray, count: int) -> list[int]:
    """Greedy by the definition: the element that makes f(T ∪ {i}) largest, f computed from scratch every time."""
    chosen: list[int] = []
    for _ in range(count):
        candidates = [i for i in range(len(similarity)) if i not in chosen]
        chosen.append(max(candidates, key=lambda i: (value(similarity, [*chosen, i]), -i)))
    return chosen


def picks_of(similarity: np.ndarray, count: int) -> torch.Tensor:
    return facility_location(torch.from_numpy(similarity)[None], count)


@pytest.mark.parametrize(("seed", "size", "count"), CASES)
def test_picks_and_gains_as_in_apricot(seed, size, count):
    similarity = random_similarity(seed, size)
    expected = FacilityLocationSelection(count, metric="precomputed", optimizer="naive").fit(similarity)
    picks = picks_of(similarity, count)
    assert picks[0].tolist() == expected.ranking.tolist()
    values = facility_location_value(torch.from_numpy(similarity)[None], picks)[0]
    np.testing.assert_allclose(values.diff().numpy(), expected.gains[1:], rtol=1e-9, atol=1e-9)


def test_joint_selection_maximises_the_sum_of_gains():
    """Several samples side by side as columns: the brute force on f₁ + f₂ + f₃."""
    samples = np.stack([random_similarity(seed, 20) for seed in range(3)])
    side_by_side = samples.transpose(1, 0, 2).reshape(20, 60)
    assert picks_of(side_by_side, 9)[0].tolist() == brute_force(side_by_side, 9)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_pick_among_cosines_has_the_largest_gain(seed, dtype):
    """Cosines tie by nature: two tokens that only cover each other gain the same, (1 − c_i) + (S_ij − c_j) =
    (S_ij − c_i) + (1 − c_j). So picks are not compared here, but what each one gained."""
    generator = torch.Generator().manual_seed(seed)
    similarity = cosine_similarity(torch.randn(1, 40, 5, generator=generator, dtype=dtype))
    picks = facility_location(similarity, 20)[0].tolist()
    truth = similarity[0].double().numpy()
    for step, pick in enumerate(picks):
        earlier = picks[:step]
        best = max(value(truth, [*earlier, i]) for i in range(40) if i not in earlier)
        assert value(truth, [*earlier, pick]) >= best - TIE - 100 * torch.finfo(dtype).eps


class TestProperties:
    @given(st.integers(1, 5), st.integers(1, 24), st.integers(1, 4), st.data())
    def test_picks_are_distinct_and_in_range(self, batch, size, width, data):
        """Also where tokens coincide, as a width of 1 makes them."""
        count = data.draw(st.integers(1, size))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        picks = facility_location(cosine_similarity(torch.randn(batch, size, width, generator=generator)), count)
        assert picks.shape == (batch, count)
        assert all(len(set(row)) == count and 0 <= min(row) <= max(row) < size for row in picks.tolist())

    def test_identical_tokens_give_no_duplicate(self):
        similarity = cosine_similarity(torch.ones(2, 16, 4))
        assert facility_location(similarity, 16).sort().values.tolist() == [list(range(16))] * 2

    def test_a_tie_goes_to_the_lowest_index(self):
        assert facility_location(torch.ones(1, 6, 6), 6).tolist() == [[0, 1, 2, 3, 4, 5]]
        two_clusters = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3))[None]
        assert facility_location(two_clusters, 4).tolist() == [[0, 3, 1, 2]]

    def test_the_same_input_gives_the_same_picks_in_any_place_of_a_batch(self):
        similarity = cosine_similarity(torch.randn(16, 32, 8))
        first, order = facility_location(similarity, 20), torch.randperm(16)
        assert torch.equal(facility_location(similarity, 20), first)
        assert torch.equal(facility_location(similarity[order], 20), first[order])
        assert torch.equal(facility_location(similarity, 7), first[:, :7])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["one", "row", "all"])
def test_not_a_number_selects_nothing_twice(bad, where):
    similarity = cosine_similarity(torch.randn(2, 12, 4))
    {"one": similarity[:, 3, 5:6], "row": similarity[:, 4], "all": similarity}[where].fill_(bad)
    for row in facility_location(similarity, 12).tolist():
        assert sorted(row) == list(range(12))


def test_wrong_numbers_and_shapes_are_quoted():
    for count in (0, -1, 9):
        with pytest.raises(ValueError, match=f"num_select={count} .* from 1 to the 8 candidates"):
            facility_location(torch.ones(1, 8, 8), count)
    with pytest.raises(ValueError, match=r"similarity has shape \[8, 8\]"):
        facility_location(torch.ones(8, 8), 2)
