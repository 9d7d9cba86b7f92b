"""Benchmarks that share a GPU do not disturb each other."""

import threading

import pytest

from toma_diffusion.bench.turns import Turns

SOON = 0.2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "gpu.lock"


def started(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_they_prepare_side_by_side(path):
    with Turns(path) as first, Turns(path) as second:
        first.prepare()
        second.prepare()
        second.prepare()  # as often as one likes


def test_nobody_prepares_while_one_times(path):
    prepared = threading.Event()

    def prepare():
        with Turns(path) as second:
            second.prepare()
            prepared.set()

    with Turns(path) as first, first.alone():
        thread = started(prepare)
        assert not prepared.wait(SOON)
    thread.join(10)
    assert prepared.is_set()


def test_nobody_times_while_another_prepares(path):
    timed = threading.Event()

    def time():
        with Turns(path) as second, second.alone():
            timed.set()

    with Turns(path) as first:
        first.prepare()
        thread = started(time)
        assert not timed.wait(SOON)
    thread.join(10)
    assert timed.is_set()


def test_two_that_wait_for_each_other_come_in_turn(path):
    """Whoever waits to time prepares nothing meanwhile, so nobody waits for it."""
    at_once, most = [], []

    def work():
        with Turns(path) as turns:
            turns.prepare()
            barrier.wait(10)
            with turns.alone():
                at_once.append(None)
                most.append(len(at_once))
                at_once.pop()

    barrier = threading.Barrier(3)
    threads = [started(work) for _ in range(3)]
    for thread in threads:
        thread.join(10)
    assert most == [1, 1, 1]


def test_who_waits_to_time_comes_before_who_would_prepare_again(path):
    order, waiting = [], threading.Event()

    def second():
        with Turns(path) as turns:
            turns.prepare()
            waiting.set()
            with turns.alone():
                order.append("second times")

    with Turns(path) as first:
        first.prepare()
        thread = started(second)
        waiting.wait(10)
        threading.Event().wait(SOON)  # by now the second waits for the first
        first.prepare()  # which prepares already and must not wait for the second in turn
        with first.alone():
            pass
        first.prepare()
        order.append("first prepares")
        thread.join(10)
    assert order == ["second times", "first prepares"]


def test_a_failure_gives_the_lock_back(path):
    with pytest.raises(RuntimeError), Turns(path) as turns, turns.alone():
        raise RuntimeError
    with Turns(path) as turns, turns.alone():
        pass


def test_without_a_file_nobody_waits():
    with Turns() as first, Turns() as second, first.alone(), second.alone():
        second.prepare()
