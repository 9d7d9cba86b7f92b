import pytest

from toma_diffusion import Action, Schedule, ToMAConfig


def actions(schedule: Schedule, num_steps: int) -> list[Action | None]:
    return [schedule.action(step, num_steps) for step in range(num_steps)]


def count(schedule: Schedule, num_steps: int) -> tuple[int, int]:
    """Selections, and weight computations (a selection is one too)."""
    taken = actions(schedule, num_steps)
    return taken.count(Action.SELECT), taken.count(Action.SELECT) + taken.count(Action.REWEIGH)


def test_fifty_steps_of_the_paper():
    assert count(Schedule(select_every=10, reweigh_every=5), 50) == (5, 10)


@pytest.mark.parametrize(
    ("select_every", "reweigh_every", "num_steps", "expected"),
    [
        (1, 1, 28, (28, 28)),
        (10, 1, 50, (5, 50)),
        (10, 4, 20, (2, 6)),  # counted from the last selection: 0, 4, 8, 10, 14, 18
        (10, 99, 50, (5, 5)),  # a selection always reweighs
        (99, 99, 50, (1, 1)),
        (10, 5, 1, (1, 1)),
    ],
)
def test_counts(select_every, reweigh_every, num_steps, expected):
    assert count(Schedule(select_every, reweigh_every), num_steps) == expected


def test_new_generation_starts_afresh():
    schedule = Schedule()
    first = actions(schedule, 7)
    assert first[0] is Action.SELECT
    assert actions(schedule, 7) == first


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
    taken = actions(Schedule(window=window), num_steps)
    assert [step for step, action in enumerate(taken) if action is not None] == list(merged)


def test_first_step_inside_the_window_selects():
    taken = actions(Schedule(select_every=10, reweigh_every=5, window=(0.26, 1.0)), 50)
    assert taken[13] is Action.SELECT
    assert [step for step, action in enumerate(taken) if action is Action.SELECT] == [13, 23, 33, 43]


def test_more_calls_than_steps_go_on_merging():
    """Some schedulers call the denoiser more often than they were asked to."""
    assert Schedule().action(59, 50) is Action.REUSE
    assert Schedule(window=(0.0, 0.5)).action(59, 50) is None


def test_unknown_number_of_steps():
    assert Schedule().action(10) is Action.SELECT
    with pytest.raises(ValueError, match=r"window=\(0.2, 1.0\) needs the number of steps"):
        Schedule(window=(0.2, 1.0)).action(0)


def test_from_config():
    config = ToMAConfig(select_every=7, reweigh_every=3, window=(0.1, 0.9))
    assert Schedule.from_config(config) == Schedule(7, 3, (0.1, 0.9))
