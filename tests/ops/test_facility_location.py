"""Picks and gains against independent truth: apricot, a float64 brute force, and exhaustion."""

import itertools
import math

import numpy as np
import pytest
import torch
from apricot import FacilityLocationSelection
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion.ops import cosine_similarity, facility_location, facility_location_value
from toma_diffusion.ops.reference import TIE


def random_similarity(seed: int, size: int) -> np.ndarray:
    """Non-negative, symmetric, float64, and without the ties of cosines (see TestCosineTies)."""
    matrix = np.random.default_rng(seed).random((size, size))
    return (matrix + matrix.T) / 2


def value(similarity: np.ndarray, chosen: list[int]) -> float:
    """f(T), by its definition."""
    return float(similarity[chosen].max(axis=0).sum())


def brute_force(similarity: np.ndarray, num_select: int) -> list[int]:
    """Greedy by the definition: the element that makes f(T ∪ {i}) largest, f computed from scratch every time."""
    chosen: list[int] = []
    for _ in range(num_select):
        candidates = [i for i in range(len(similarity)) if i not in chosen]
        chosen.append(max(candidates, key=lambda i: (value(similarity, [*chosen, i]), -i)))
    return chosen


def gains(similarity: np.ndarray, picks: torch.Tensor) -> np.ndarray:
    values = facility_location_value(torch.from_numpy(similarity)[None], picks)[0].numpy()
    return np.diff(values, prepend=0.0)


CASES = [
    (seed, size, num_select)
    for size, num_select in [(5, 2), (12, 12), (33, 8), (64, 32), (100, 25)]
    for seed in range(24)
]


class TestAgainstIndependentTruth:
    def test_enough_cases(self):
        assert len(CASES) >= 100

    @pytest.mark.parametrize(("seed", "size", "num_select"), CASES)
    def test_apricot(self, seed, size, num_select):
        similarity = random_similarity(seed, size)
        expected = FacilityLocationSelection(num_select, metric="precomputed", optimizer="naive").fit(similarity)
        picks = facility_location(torch.from_numpy(similarity)[None], num_select)
        assert picks[0].tolist() == expected.ranking.tolist()
        np.testing.assert_allclose(gains(similarity, picks)[1:], expected.gains[1:], rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize(("seed", "size", "num_select"), CASES[::6])
    def test_brute_force(self, seed, size, num_select):
        similarity = random_similarity(seed, size)
        picks = facility_location(torch.from_numpy(similarity)[None], num_select)
        assert picks[0].tolist() == brute_force(similarity, num_select)

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize(("size", "num_select"), [(6, 3), (8, 4), (10, 3), (10, 5)])
    def test_within_one_minus_one_over_e_of_the_optimum(self, seed, size, num_select):
        similarity = random_similarity(seed, size)
        picks = facility_location(torch.from_numpy(similarity)[None], num_select)[0].tolist()
        best = max(value(similarity, list(subset)) for subset in itertools.combinations(range(size), num_select))
        assert value(similarity, picks) >= (1 - 1 / math.e) * best - 1e-12

    def test_joint_selection_maximises_the_sum_of_gains(self):
        """Several samples side by side as columns: the brute force on f₁ + f₂ + f₃."""
        samples = np.stack([random_similarity(seed, 20) for seed in range(3)])
        side_by_side = samples.transpose(1, 0, 2).reshape(20, 60)
        picks = facility_location(torch.from_numpy(side_by_side)[None], 9)[0].tolist()
        assert picks == brute_force(side_by_side, 9)


class TestCosineTies:
    """Cosines tie by nature, and rounding breaks the tie: two tokens that only cover each other gain exactly the same,
    (1 − c_i) + (S_ij − c_j) = (S_ij − c_i) + (1 − c_j). So picks are not compared here, but what each one gained.
    """

    @pytest.mark.parametrize("seed", range(10))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_every_pick_has_the_largest_gain(self, seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        similarity = cosine_similarity(torch.randn(1, 40, 5, generator=generator, dtype=dtype))
        picks = facility_location(similarity, 20)[0].tolist()
        truth = similarity[0].double().numpy()
        for step, pick in enumerate(picks):
            earlier = picks[:step]
            best = max(value(truth, [*earlier, i]) for i in range(40) if i not in earlier)
            assert value(truth, [*earlier, pick]) >= best - TIE - 100 * torch.finfo(dtype).eps


class TestProperties:
    @given(st.integers(0, 10**6), st.integers(1, 40), st.data())
    def test_gains_never_increase(self, seed, size, data):
        num_select = data.draw(st.integers(1, size))
        similarity = random_similarity(seed, size)
        seen = gains(similarity, facility_location(torch.from_numpy(similarity)[None], num_select))
        assert (np.diff(seen) <= TIE + 1e-9).all()  # of gains that tie, the first is taken

    @given(st.integers(1, 5), st.integers(1, 24), st.integers(1, 4), st.data())
    def test_picks_are_distinct_and_in_range(self, batch, size, width, data):
        """Also where tokens coincide, as a width of 1 makes them."""
        num_select = data.draw(st.integers(1, size))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
        picks = facility_location(cosine_similarity(torch.randn(batch, size, width, generator=generator)), num_select)
        assert picks.shape == (batch, num_select)
        assert picks.dtype == torch.int64
        assert all(len(set(row)) == num_select and 0 <= min(row) <= max(row) < size for row in picks.tolist())

    def test_shorter_selection_is_a_prefix(self):
        similarity = cosine_similarity(torch.randn(3, 30, 8))
        assert torch.equal(facility_location(similarity, 7), facility_location(similarity, 20)[:, :7])

    def test_identical_tokens_give_no_duplicate(self):
        similarity = cosine_similarity(torch.ones(2, 16, 4))
        assert facility_location(similarity, 16).sort().values.tolist() == [list(range(16))] * 2

    def test_tie_goes_to_the_lowest_index(self):
        assert facility_location(torch.ones(1, 6, 6), 6).tolist() == [[0, 1, 2, 3, 4, 5]]
        two_clusters = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3))[None]
        assert facility_location(two_clusters, 4).tolist() == [[0, 3, 1, 2]]

    def test_clusters_are_covered_before_any_is_visited_twice(self):
        centres = torch.eye(8)
        tokens = (centres[:, None, :] + 0.01 * torch.rand(8, 5, 8)).reshape(1, 40, 8)
        picks = facility_location(cosine_similarity(tokens), 8)[0].tolist()
        assert sorted(pick // 5 for pick in picks) == list(range(8))

    def test_same_input_same_picks(self):
        similarity = cosine_similarity(torch.randn(8, 64, 16))
        first = facility_location(similarity, 32)
        assert all(torch.equal(first, facility_location(similarity, 32)) for _ in range(5))

    def test_permuting_the_batch_permutes_the_picks(self):
        similarity = cosine_similarity(torch.randn(16, 32, 8))
        order = torch.randperm(16)
        assert torch.equal(facility_location(similarity[order], 9), facility_location(similarity, 9)[order])


class TestHostileInput:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("where", ["one", "row", "all"])
    def test_not_a_number_selects_nothing_twice(self, bad, where):
        similarity = cosine_similarity(torch.randn(2, 12, 4))
        {"one": similarity[:, 3, 5:6], "row": similarity[:, 4], "all": similarity}[where].fill_(bad)
        for row in facility_location(similarity, 12).tolist():
            assert sorted(row) == list(range(12))

    def test_zero_tokens(self):
        assert facility_location(cosine_similarity(torch.zeros(1, 5, 3)), 3).tolist() == [[0, 1, 2]]

    @pytest.mark.parametrize("num_select", [0, -1, 9])
    def test_wrong_number(self, num_select):
        with pytest.raises(ValueError, match=f"num_select={num_select} .* from 1 to the 8 candidates"):
            facility_location(torch.ones(1, 8, 8), num_select)

    def test_wrong_shape(self):
        with pytest.raises(ValueError, match=r"similarity has shape \[8, 8\]"):
            facility_location(torch.ones(8, 8), 2)
