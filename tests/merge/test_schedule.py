import pytest

from toma_diffusion import Merge
from toma_diffusion.merge import Action, Schedule


def steps_of(action: Action, schedule: Schedule, num_steps: int) -> list[int]:
    return [step for step in range(num_steps) if schedule.action(step, num_steps) is action]


@pytest.mark.parametrize(
    ("select_every", "reweigh_every", "num_steps", "selects", "reweighs"),
    [
        (10, 5, 50, [0, 10, 20, 30, 40], [5, 15, 25, 35, 45]),  # the paper
        (1, 1, 3, [0, 1, 2], []),
        (10, 4, 20, [0, 10], [4, 8, 14, 18]),  # counted from the last selection
        (10, 99, 20, [0, 10], []),  # a selection always reweighs
        (10, 5, 1, [0], []),
    ],
)
def test_steps_that_select_and_reweigh(select_every, reweigh_every, num_steps, selects, reweighs):
    schedule = Schedule(select_every, reweigh_every)
    assert steps_of(Action.SELECT, schedule, num_steps) == selects
    assert steps_of(Action.REWEIGH, schedule, num_steps) == reweighs


@pytest.mark.parametrize(
    ("window", "num_steps", "merged"),
    [
        ((0.0, 1.0), 10, range(10)),
        ((0.2, 1.0), 10, range(2, 10)),
        ((0.0, 0.5), 10, range(5)),
        ((0.1, 0.7), 30, range(3, 21)),  # 0.1 · 30 and 0.7 · 30 are both just off a whole number
        ((0.25, 1.0), 10, range(3, 10)),
        ((0.5, 1.0), 1, range(0)),
    ],
)
def test_window(window, num_steps, merged):
    schedule = Schedule(window=window)
    assert [step for step in range(num_steps) if schedule.action(step, num_steps)] == list(merged)
    assert schedule.merges(num_steps) == bool(merged)
    assert steps_of(Action.SELECT, schedule, num_steps)[:1] == list(merged)[:1]  # the first inside it selects


def test_steps_that_are_skipped_do_not_count():
    schedule, computed = Schedule(select_every=2, reweigh_every=2), (0, 1, 4, 7, 9)
    found = [schedule.action(step, 10, computed) for step in computed]
    assert [action is Action.SELECT for action in found] == [True, False, True, False, True]


def test_more_calls_than_steps_go_on_merging():
    """Some schedulers call the denoiser more often than they were asked to."""
    assert Schedule().action(59, 50) is Action.REUSE
    assert Schedule(window=(0.0, 0.5)).action(59, 50) is None


def test_unknown_number_of_steps():
    assert Schedule().action(10) is Action.SELECT
    with pytest.raises(ValueError, match=r"window=\(0.2, 1.0\) needs the number of steps"):
        Schedule(window=(0.2, 1.0)).action(0)


def test_from_config():
    assert Schedule.from_config(Merge(select_every=7, reweigh_every=3, window=(0.1, 0.9))) == Schedule(7, 3, (0.1, 0.9))
    assert Schedule.from_config(Merge(select_every=7)) == Schedule(7, 7)
