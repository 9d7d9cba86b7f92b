"""Computed steps are moved by one as long as that is closer to the original, on figures out of the air."""

import re
from itertools import combinations

import pytest
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from run_folders import FACTS
from tiny import sdxl_unet
from tiny_text import PROMPTS
from toma_lab.metrics import MetricSet
from toma_lab.tune.bar import SearchBar
from toma_lab.tune.candidates import moved, moved_steps, open_candidates
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import Goal
from toma_lab.tune.measure import Meter
from toma_lab.tune.plan import TunePlan
from toma_lab.tune.run import Search

STEPS = 8
START, BEST = (0, 1, 2, 4, 7), (0, 1, 3, 5, 6)
"""What `fast` computes of eight steps, and three moves from there."""


def opened(*texts: str, steps: int = STEPS):
    return open_candidates(sdxl_unet(), texts, steps).columns


@given(st.integers(2, 30), st.data())
def test_one_step_by_one_place(steps, data):
    computed = (0, *sorted(data.draw(st.sets(st.integers(1, steps - 1)))))
    found = list(moved_steps(computed, steps))
    assert len(set(found)) == len(found)
    for other in found:
        (gone,), (new,) = ({*computed} - {*other}), ({*other} - {*computed})
        assert abs(gone - new) == 1
        assert other == (0, *sorted(other[1:]))
        assert other[-1] < steps
    possible = {(a, b) for a in computed[1:] for b in (a - 1, a + 1) if 0 < b < steps and b not in computed}
    assert len(found) == len(possible)


def test_all_else_stays():
    (merged,) = opened("toma-late:min_tokens=0;computed=4;ratio=0.25+steps:7")
    others = moved(merged, STEPS)
    assert len(others) > 3
    title = r"toma-late 0\.25, min_tokens=0, computed=\[0, .*\] \+ 7 steps"
    assert all(re.fullmatch(title, other.title) for other in others)
    assert all(other.own.merge == merged.own.merge for other in others)


def test_what_skips_nothing_has_no_neighbours():
    for text in ("toma-stage", "steps:6", "deepcache:interval=2"):
        assert moved(*opened(text), STEPS) == []
    assert moved(*opened("balanced", steps=4), 4) == []  # it merges there


def test_moves_begin_with_the_steps_that_were_computed():
    """By the noise levels of the scheduler, which only a generation knows."""
    (few,) = opened("fast:computed=3")
    computed = (0, 4, 6)
    assert list_of(few) != computed
    assert [list_of(other) for other in moved(few, STEPS, computed)] == list(moved_steps(computed, STEPS))


@pytest.fixture
def work(tmp_path):
    """A search in which every schedule of five steps was measured before: the further from `BEST`, the worse."""

    def make(budget: str, best=BEST, methods=()):
        plan = TunePlan(model="", model_class="", prompts=PROMPTS, steps=STEPS, budget=budget, methods=methods)
        folder = TuneFolder.start(tmp_path / "run", plan, FACTS)
        variants = opened("fast", *(f"fast:computed=(0,{','.join(map(str, each))})" for each in schedules()))
        for variant in variants:
            computed = list_of(variant)
            lpips = 0.01 * (1 + sum(abs(one - other) for one, other in zip(computed, best, strict=True)))
            for item in plan.items:
                cells = {"seconds": 1.0, "baseline_seconds": 1.6, "psnr": 30.0, "lpips": lpips}
                folder.add(variant, item, cells | {"computed_steps": list(computed)})
        return Search(folder, Meter(folder, None, MetricSet()), PartialState(cpu=True), SearchBar(None))

    return make


def list_of(variant):
    """The steps that are computed."""
    return variant.own.computed(STEPS)


def schedules():
    """All of five steps but the first, without that of `fast`."""
    return set(combinations(range(1, STEPS), 4)) - {START[1:]}


def climbed(searching):
    """Which schedule is closest in the end, and how many others were looked at."""
    figures, seen = searching.search(opened("fast"), Goal(max_lpips=0.5))
    figures, seen = searching.climb(figures, seen, Goal(max_lpips=0.5))
    closest = min(figures, key=lambda variant: figures[variant].distance)
    return list_of(closest), len(seen) - 1


def test_it_climbs_to_the_best(work):
    computed, others = climbed(work("large"))
    assert computed == BEST
    assert len([*moved_steps(START, STEPS)]) < others < 4 * 8  # no schedule twice


def test_a_smaller_budget_makes_fewer_moves(work):
    computed, others = climbed(work("small"))
    assert computed in moved_steps(START, STEPS)
    assert others == len([*moved_steps(START, STEPS)])


def test_it_ends_where_no_move_is_closer(work):
    assert climbed(work("large", best=START)) == (START, len([*moved_steps(START, STEPS)]))


def test_candidates_of_the_user_are_not_changed(work):
    assert climbed(work("large", methods=("fast",))) == (START, 0)
