"""Fewer cases of the same strength."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, cycle, product


def pairwise(*lists: Iterable) -> list[tuple]:
    """Some tuples of the product in which any two values of two lists still meet, in the same order every time.

    Most failures depend on one value or on two together: an adapter that misses a scope, a scheduler that calls twice
    with guidance. Five families, three scopes and five ways of offloading are 75 tuples, of which 25 hold every pair.
    Two lists are their whole product: no pair of family and scope, or of family and concern, is ever lost. Where three
    values matter together (what is compiled, for a family, in a scope), write the cases out.

    Greedy: again and again the tuple with the most pairs not seen yet, of equals the first in the product.
    """
    values = [list(each) for each in lists]
    cases = list(product(*map(range, map(len, values))))  # as indices: not every value can be put into a set
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(best))
        chosen.append(tuple(each[index] for each, index in zip(values, best, strict=True)))
    return chosen


def in_turn(first: Iterable, *others: Iterable) -> list[tuple]:
    """Every value of the first list once, with those of the others by turns: where one value decides alone."""
    return list(zip(first, *map(cycle, others), strict=False))


def named(value: object) -> str:
    """What a value is called in the name of a test."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def _pairs(case: tuple[int, ...]) -> set:
    """Any two of its indices, each with the number of its list."""
    return set(combinations(enumerate(case), 2))
