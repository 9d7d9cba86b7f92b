"""The cover of all pairs that other tests rely on."""

from itertools import combinations, product

import pytest
from pairs import named, pairwise


@pytest.mark.parametrize(
    ("lists", "most"),
    [
        (("abcde", "xyz", range(5)), 25),
        (((0, 1, 2), (0, 1, 2), (0, 1), range(5)), 15),
        (("ab", "cd"), 4),
        (("ab", "cd", "ef", "gh"), 6),
    ],
    ids=str,
)
def test_any_two_values_meet_in_few_cases_of_the_product(lists, most):
    cases = pairwise(*lists)
    for first, second in combinations(range(len(lists)), 2):
        assert {(case[first], case[second]) for case in cases} == set(product(lists[first], lists[second]))
    assert set(cases) <= set(product(*lists))
    assert len(set(cases)) == len(cases) <= most
    assert pairwise(*lists) == cases


def test_values_without_a_name_are_written_out():
    assert [named(value) for value in (len, "module", 0.5)] == ["len", "module", "0.5"]
