"""The cover of all pairs that other tests rely on."""

from itertools import combinations, product

import pytest
from pairs import named, pairwise

LISTS = [
    ("abcde", "xyz", range(5)),
    ((0, 1, 2), (0, 1, 2), (0, 1), range(5)),
    ("ab", "cd"),
    ("ab", "cd", "ef", "gh"),
    ("abc", "d", "ef"),
]


@pytest.mark.parametrize("lists", LISTS, ids=str)
def test_any_two_values_meet(lists):
    cases = pairwise(*lists)
    for first, second in combinations(range(len(lists)), 2):
        assert {(case[first], case[second]) for case in cases} == set(product(lists[first], lists[second]))


@pytest.mark.parametrize("lists", LISTS, ids=str)
def test_cases_are_of_the_product_once_and_always_the_same(lists):
    cases = pairwise(*lists)
    assert set(cases) <= set(product(*lists))
    assert len(set(cases)) == len(cases)
    assert pairwise(*lists) == cases


@pytest.mark.parametrize(("lists", "most"), list(zip(LISTS, (25, 15, 4, 6, 6), strict=True)), ids=str)
def test_it_is_small(lists, most):
    """At least as many as the two longest lists have pairs; greedy is seldom far above."""
    assert len(pairwise(*lists)) <= most


def test_two_lists_are_their_product():
    assert sorted(pairwise("abc", "de")) == sorted(product("abc", "de"))


def test_values_without_a_name_are_written_out():
    assert [named(value) for value in (len, "module", 0.5)] == ["len", "module", "0.5"]
