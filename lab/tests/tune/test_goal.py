"""What the user wants, and what reaches it."""

import pytest
from toma_lab.columns import Column
from toma_lab.tune.goal import Figures, Goal, like_lpips
from toma_lab.tune.outcome import Outcome, Result

from toma_diffusion import UsageError


def figures(speed_up=1.5, psnr=30.0, lpips=0.03):
    return Figures(images=4, speed_up=speed_up, psnr=psnr, lpips=lpips)


class TestWish:
    def test_a_quality_is_a_limit_of_lpips(self):
        assert Goal.of(quality="lossless").max_lpips == 0.01
        assert Goal.of() == Goal.of(quality="high")

    def test_limits_may_be_given_together(self):
        goal = Goal.of(max_lpips=0.05, min_psnr=28.0)
        assert goal.holds(figures())
        assert not goal.holds(figures(psnr=27.9))
        assert not goal.holds(figures(lpips=0.051))

    @pytest.mark.parametrize(
        "given",
        [
            {"quality": "high", "max_lpips": 0.1},
            {"speed_up": 2.0, "min_psnr": 30.0},
            {"quality": "high", "speed_up": 2.0},
        ],
    )
    def test_others_exclude_each_other(self, given):
        with pytest.raises(UsageError, match="exclude each other"):
            Goal.of(**given)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"quality": "good"}, "quality='good' is not known: use one of 'lossless', 'high', 'medium'"),
            ({"speed_up": 0.5}, "speed_up=0.5 is not allowed: it must be above 1"),
            ({"max_lpips": 0.0}, "max_lpips=0.0 is not allowed"),
        ],
    )
    def test_mistakes_are_quoted(self, given, message):
        with pytest.raises(UsageError, match=message):
            Goal.of(**given)


class TestWithoutLpips:
    def test_the_limit_becomes_one_of_psnr_and_says_so(self):
        goal = Goal.of(max_lpips=0.05, without_lpips="lpips: there is no file 'x'.")
        assert (goal.max_lpips, goal.min_psnr) == (None, 26.1)
        assert "LPIPS is not measured (lpips: there is no file 'x')" in goal.note
        assert "PSNR ≥ 26.1 dB" in goal.note
        assert goal.holds(figures(lpips=None))

    def test_a_stricter_psnr_of_the_user_stays(self):
        assert Goal.of(max_lpips=0.05, min_psnr=40.0, without_lpips="none").min_psnr == 40.0

    def test_a_limit_of_psnr_needs_none(self):
        assert Goal.of(min_psnr=30.0, without_lpips="none").note == ""

    def test_a_smaller_lpips_is_a_higher_psnr(self):
        assert like_lpips(0.01) > like_lpips(0.05) > like_lpips(0.15)


class TestReaching:
    def test_no_gain_in_time_is_no_answer(self):
        assert not Goal.of(quality="high").holds(figures(speed_up=1.02, lpips=0.0))

    def test_what_is_beyond_the_limit_may_still_hold_on_more_images(self):
        goal = Goal.of(max_lpips=0.05)
        assert goal.may_hold(figures(lpips=0.12))
        assert not goal.may_hold(figures(lpips=0.13))
        assert goal.may_hold(Figures(images=1, speed_up=1.5, psnr=30.0, lpips=0.19))
        assert not Goal.of(min_psnr=30.0).may_hold(figures(psnr=25.0))

    def test_a_speed(self):
        goal = Goal.of(speed_up=1.5)
        assert goal.holds(figures(speed_up=1.5, lpips=0.9))
        assert not goal.holds(figures(speed_up=1.49))
        assert str(goal) == "the nearest at 1.5× the speed"


def test_it_says_which_condition_failed():
    near, far = Figures(4, 1.01, 30.0, 0.043), Figures(4, 1.5, 20.0, 0.07)
    goal = Goal(max_lpips=0.05, min_psnr=25)
    assert goal.missed(near) == ["it is not faster than the original (from 1.03× it would count)"]
    assert goal.missed(far) == ["its LPIPS is above 0.05", "its PSNR is below 25 dB"]
    results = tuple(Result(Column(name), each, is_finalist=True) for name, each in (("near", near), ("far", far)))
    sentence = Outcome(goal, None, False, results, ()).sentence
    assert "The nearest was near: 1.01× as fast, LPIPS 0.043, PSNR 30.0 dB; it is not faster" in sentence
    assert "What is as near saves no time here: allow a larger distance" in sentence
