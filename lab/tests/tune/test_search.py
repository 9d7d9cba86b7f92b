"""Who goes on, and who is the answer, on figures out of the air."""

import pytest
from toma_lab.columns import Column, parse_shortcut
from toma_lab.tune.goal import Figures, Goal
from toma_lab.tune.search import answer, figures_of, finalists_of, ranked, substitutes, survivors


def variant(steps: int) -> Column:
    return Column("steps", shortcuts=(parse_shortcut(f"steps:{steps}"),))


def measured(seconds, original, psnr, lpips):
    return {"seconds": seconds, "baseline_seconds": original, "psnr": psnr, "lpips": lpips}


def table(*rows: tuple[float, float]) -> dict[Column, Figures]:
    """From (speed-up, LPIPS); the variants are numbered from 1."""
    return {
        variant(number): Figures(1, speed, 40 - 100 * lpips, lpips)
        for number, (speed, lpips) in enumerate(rows, start=1)
    }


def numbers(variants) -> list[int]:
    return [each.shortcuts[0].steps for each in variants]


class TestFigures:
    def test_speeds_are_medians_of_pairs_and_errors_are_pooled(self):
        found = figures_of(
            [measured(1.0, 2.0, 30.0, 0.1), measured(10.0, 20.0, "inf", 0.3), measured(1.0, 1.0, 30.0, 0.2)]
        )
        assert found is not None
        assert (found.images, found.speed_up) == (3, 2.0)
        assert found.lpips == pytest.approx(0.2)
        assert found.psnr == pytest.approx(31.76, abs=0.01)

    def test_one_failure_is_enough(self):
        assert figures_of([measured(1.0, 2.0, 30.0, 0.1), {"failure": "out of memory"}]) is None
        assert figures_of([]) is None


class TestRungs:
    def test_the_front_within_the_limit_comes_first_the_fastest_of_it_first(self):
        figures = table((1.2, 0.01), (1.5, 0.04), (1.4, 0.045), (2.0, 0.4), (0.7, 0.0))
        assert numbers(ranked(figures, Goal(max_lpips=0.05))) == [2, 1, 3, 4, 5]

    def test_at_a_wanted_speed_the_nearest_come_first(self):
        figures = table((1.2, 0.01), (1.5, 0.04), (1.6, 0.06), (2.0, 0.05), (1.45, 0.2))
        assert numbers(ranked(figures, Goal(speed_up=1.5))) == [2, 4, 3, 5, 1]

    def test_half_goes_on_but_enough_for_the_end(self):
        figures = table(*((1 + number / 10, number / 100) for number in range(1, 8)))
        assert len(survivors(figures, Goal(max_lpips=0.5), at_least=3)) == 4
        assert len(survivors(figures, Goal(max_lpips=0.5), at_least=6)) == 6
        assert len(survivors(figures, Goal(max_lpips=0.5), at_least=9)) == 7


class TestFinalists:
    FIGURES = table((1.2, 0.01), (1.4, 0.03), (1.5, 0.04), (1.6, 0.07), (1.7, 0.08), (2.0, 0.9))

    def test_mostly_those_that_reach_the_goal(self):
        assert numbers(finalists_of(self.FIGURES, Goal(max_lpips=0.05), 3)) == [3, 2, 5]
        assert numbers(finalists_of(self.FIGURES, Goal(max_lpips=0.02), 3)) == [1, 5, 4]

    def test_substitutes_are_the_nearest_first(self):
        goal = Goal(max_lpips=0.05)
        tried = [variant(number) for number in (3, 2, 5)]
        assert numbers(substitutes(self.FIGURES, goal, tried)) == [1, 4]


class TestAnswer:
    def test_the_fastest_within_the_limit(self):
        chosen, is_reached = answer(table((1.2, 0.01), (1.5, 0.049), (2.0, 0.051)), Goal(max_lpips=0.05))
        assert (numbers([chosen]), is_reached) == ([2], True)

    def test_the_nearest_at_a_speed(self):
        chosen, is_reached = answer(table((1.4, 0.01), (1.5, 0.2), (2.0, 0.1)), Goal(speed_up=1.5))
        assert (numbers([chosen]), is_reached) == ([3], True)

    def test_none_within_the_limit_is_the_model_as_it_is(self):
        assert answer(table((1.4, 0.2), (1.01, 0.0)), Goal(max_lpips=0.05)) == (None, False)

    def test_none_so_fast_is_the_fastest(self):
        chosen, is_reached = answer(table((1.4, 0.2), (1.2, 0.0)), Goal(speed_up=3.0))
        assert (numbers([chosen]), is_reached) == ([1], False)

    def test_no_finalists(self):
        assert answer({}, Goal(speed_up=3.0)) == (None, False)
