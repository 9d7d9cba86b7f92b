"""Which steps are computed, which reuse, and which merge."""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toma_diffusion import PRESETS, Action, Reuse, Schedule

EVERY = {"select_every": 1, "reweigh_every": 1}


def reused(num_steps: int, **fields) -> list[int]:
    schedule = Schedule(reuse=Reuse(**fields))
    return [step for step in range(num_steps) if schedule.reuses(step, num_steps)]


def computed(num_steps: int, **fields) -> list[int]:
    return sorted(set(range(num_steps)) - set(reused(num_steps, **fields)))


@pytest.mark.parametrize(
    ("fields", "num_steps", "expected"),
    [
        ({"start": 0}, 1, [0]),
        ({"start": 0}, 4, [0, 2]),
        ({"start": 0}, 8, [0, 2, 4, 6]),
        ({"start": 0, "period": 3}, 8, [0, 3, 6]),
        ({"start": 0, "period": 9}, 8, [0]),
        ({}, 8, [0, 1, 3, 5, 7]),  # the default: the first fifth, rounded up, then every second
        ({}, 20, [0, 1, 2, 3, *range(5, 20, 2)]),
        ({}, 50, [*range(10), *range(11, 50, 2)]),
        ({"start": 0.1}, 30, [0, 1, 2, *range(4, 30, 2)]),  # 0.1 · 30 is just above 3
        ({"start": 1}, 8, list(range(8))),
        ({"start": 0, "period": 2.5}, 11, [0, 3, 5, 8, 10]),  # distances of 2 and 3 in turn
        ({"start": 0, "end": 0.25}, 8, [0, 2, 4, 6, 7]),
        ({"start": 0, "end": 0.25}, 4, [0, 2, 3]),
        ({"start": 0, "period": 15, "end": 0.1}, 20, [0, 15, 18, 19]),
        ({"start": 0, "end": 1}, 8, list(range(8))),
        ({"start": 0, "period": 2.5, "growth": 1.5}, 20, [0, 1, 3, 5, 8, 11, 14, 18]),
        ({"start": 0, "period": 2.5, "growth": 1.5, "min_computed": 5}, 8, [0, 1, 2, 4, 7]),
        ({"start": 0, "period": 2.5, "growth": 1.5, "min_computed": 5}, 4, [0, 1, 3]),  # never all
        ({"start": 0, "period": 2.5, "growth": 1.5, "min_computed": 5}, 2, [0]),
        ({"start": 0, "period": 2.5, "growth": 1.5, "min_computed": 5}, 1, [0]),
        ({"start": 0, "period": 4, "min_computed": 5}, 8, [0, 2, 3, 5, 7]),  # evenly
        ({"start": 0.3, "period": 3, "growth": 1.5}, 20, [0, 1, 2, 3, 4, 5, 7, 10, 13, 18]),
        ({"start": 0, "period": 4, "growth": 2, "end": 0.2}, 10, [0, 5, 8, 9]),
        (
            {"start": 0, "period": 4, "growth": 2, "end": 0.5, "min_computed": 4},
            8,
            [0, 4, 5, 6, 7],
        ),  # those of the end count
        ({"min_computed": 2}, 20, [0, 1, 2, 3, *range(5, 20, 2)]),  # there are more anyway
        ({"computed": (0, 3, 30)}, 8, [0, 3]),
        ({"computed": (0,), "start": 0.5, "period": 1}, 4, [0]),  # in place of all else
        ({"start": 0, "min_steps": 5}, 4, [0, 1, 2, 3]),
        ({"start": 0, "min_steps": 4}, 4, [0, 2]),
        ({"computed": (0, 1), "min_steps": 5}, 4, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_computed_steps(fields, num_steps, expected):
    assert computed(num_steps, **fields) == expected


@given(
    st.integers(1, 120),
    st.floats(1.01, 30),
    st.floats(1, 4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 10),
)
def test_growing_distances(num_steps, period, growth, start, end, least):
    """Whatever is asked for: the first steps and the last ones are computed, and distances do not shrink by more than
    rounding does."""
    fields = {"period": period, "growth": growth, "start": start, "end": end, "min_computed": least}
    steps = computed(num_steps, **fields)
    first, last = max(1, math.ceil(round(start * num_steps, 6))), num_steps - math.ceil(round(end * num_steps, 6))
    assert {*range(min(first, num_steps)), *range(max(0, last), num_steps)} <= {*steps}
    if growth > 1 and last > first:
        assert len(steps) >= min(least, num_steps - 1)
        assert len(steps) < num_steps
        spread = [first - 1, *(step for step in steps if first <= step < last)]
        distances = [later - earlier for earlier, later in pairwise(spread)]
        assert all(later >= earlier - 1 for earlier, later in pairwise(distances))


@pytest.mark.parametrize(
    ("fields", "num_steps", "expected"),
    [
        ({"order": 0.5}, 20, 0.5),
        ({"order": 0}, 50, 0),
        ({"period": 2.5, "growth": 1.5, "start": 0}, 50, 0.7),  # 20 are computed
        ({"period": 2.5, "growth": 1.5, "start": 0}, 20, 0.25),
        ({"period": 2.5, "growth": 1.5, "start": 0}, 8, 0),
        ({"computed": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)}, 20, 0.5),
        ({"start": 0}, None, 0),  # not known
        ({"start": 0, "order": 1}, None, 1),
    ],
    ids=str,
)
def test_the_more_are_computed_the_further_lines_are_followed(fields, num_steps, expected):
    assert Schedule(reuse=Reuse(**fields)).order(num_steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "of_20", "of_8", "of_50", "of_4"),
    [
        ("balanced", [0, 1, 2, 3, 4, 5, 7, 9, 11, 13, 16, 19], [0, 1, 2, 3, 5, 7], 31, 4),
        ("fast", [0, 1, 2, 3, 6, 9, 13, 18], [0, 1, 2, 4, 7], 20, 3),
        ("faster", [0, 1, 3, 6, 11, 18], [0, 1, 3, 6], 15, 3),
    ],
)
def test_presets_compute_what_the_documentation_says(name, of_20, of_8, of_50, of_4):
    fields = dataclasses.asdict(PRESETS[name].reuse)
    assert computed(20, **fields) == of_20
    assert computed(8, **fields) == of_8
    assert (len(computed(50, **fields)), len(computed(4, **fields))) == (of_50, of_4)


@pytest.mark.parametrize("num_steps", [1, 4, 8, 20, 50])
@pytest.mark.parametrize(
    "fields",
    [{}, {"start": 0}, {"period": 50, "start": 0}, {"growth": 2, "start": 0, "end": 0.5}, {"computed": (0,)}],
    ids=str,
)
def test_the_first_step_is_never_reused(fields, num_steps):
    assert computed(num_steps, **fields)[0] == 0


@pytest.mark.parametrize("num_steps", [1, 4, 8, 20, 50, None])
@pytest.mark.parametrize("fields", [{}, {"start": 0}, {"growth": 2.0, "end": 0.1, "min_computed": 3}], ids=str)
def test_with_period_1_none_is(fields, num_steps):
    schedule = Schedule(reuse=Reuse(period=1, **fields))
    assert not schedule.reuses_any(num_steps)
    assert not any(schedule.reuses(step, num_steps) for step in range(60))


@pytest.mark.parametrize(
    ("fields", "num_steps", "expected"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"start": 1}, 8, False),
        ({"min_steps": 5}, 4, False),
        ({"min_steps": 5}, 5, True),
    ],
    ids=str,
)
def test_whether_any_is(fields, num_steps, expected):
    assert Schedule(reuse=Reuse(**fields)).reuses_any(num_steps) is expected


class TestMerging:
    """Together with merging."""

    def actions(self, num_steps: int, schedule: Schedule) -> list[str]:
        taken = [schedule.action(step, num_steps) for step in range(num_steps)]
        return ["-" if action is None else action.value for action in taken]

    def test_only_steps_that_merge_count(self):
        """Of steps 0, 2, 4, 6, 8, 10: a selection every third of them, weights every second after one."""
        schedule = Schedule(select_every=3, reweigh_every=2, reuse=Reuse(start=0))
        assert self.actions(12, schedule)[::2] == ["select", "reuse", "reweigh"] * 2
        assert set(self.actions(12, schedule)[1::2]) == {"-"}

    def test_inside_a_window(self):
        schedule = Schedule(2, 1, window=(0.5, 0.9), reuse=Reuse(computed=(0, 6, 8, 9)))
        assert self.actions(10, schedule) == ["-"] * 6 + ["select", "-", "reweigh", "-"]

    def test_nothing_reused_counts_as_before(self):
        schedule = Schedule(3, 2, window=(0.25, 1.0))
        assert self.actions(8, Schedule(3, 2, window=(0.25, 1.0), reuse=Reuse(period=1))) == self.actions(8, schedule)

    @pytest.mark.parametrize("update", ["clusters", "destinations"])
    @pytest.mark.parametrize("num_steps", [4, 20])
    def test_a_correction_merges_in_steps_that_reuse(self, update, num_steps):
        schedule = Schedule(**EVERY, reuse=Reuse(period=3, start=0, update=update))
        merged = [step for step in range(num_steps) if schedule.action(step, num_steps) is not None]
        assert merged == reused(num_steps, period=3, start=0) != []

    def test_a_correction_without_anything_to_correct(self):
        schedule = Schedule(**EVERY, reuse=Reuse(start=0, min_steps=5, update="clusters"))
        assert self.actions(4, schedule) == ["select"] * 4

    def test_few_steps_merge_and_many_reuse(self):
        """As in the preset `balanced`."""
        schedule = Schedule(**EVERY, max_steps=4, reuse=Reuse(start=0, min_steps=5))
        assert self.actions(4, schedule) == ["select"] * 4
        assert not schedule.reuses_any(4)
        assert self.actions(8, schedule) == ["-"] * 8
        assert schedule.reuses_any(8)
        assert not schedule.merges(8)


class TestUnknownNumberOfSteps:
    @pytest.mark.parametrize(
        "fields",
        [
            {"start": 0},
            {"computed": (0, 2)},
            {"period": 1},
            {"start": 0, "period": 2.5},
            {"computed": (0,), "end": 0.5},
        ],
        ids=str,
    )
    def test_where_nothing_needs_it(self, fields):
        schedule = Schedule(reuse=Reuse(**fields))
        assert [schedule.reuses(step) for step in range(8)] == [schedule.reuses(step, 8) for step in range(8)]
        assert schedule.action(0) is Action.SELECT

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({}, "start=0.2"),
            ({"start": 0, "end": 0.1}, "end=0.1"),
            ({"start": 0, "growth": 1.5}, "growth=1.5"),
            ({"start": 0, "min_computed": 3}, "min_computed=3"),
            ({"start": 0, "min_steps": 5}, "min_steps=5"),
            ({"computed": (0,), "min_steps": 5}, "min_steps=5"),
        ],
        ids=str,
    )
    def test_where_something_does(self, fields, named):
        schedule = Schedule(reuse=Reuse(**fields))
        for ask in (schedule.reuses, schedule.action):
            with pytest.raises(ValueError, match=f"{named}.*needs the number of steps"):
                ask(0)
        assert schedule.reuses_any(None)
