"""Benchmarks that share a GPU do not disturb each other."""

import signal
import subprocess
import sys
import threading
from time import sleep

import pytest
from toma_lab.bench.turns import Turns

fcntl = pytest.importorskip("fcntl")  # not on Windows, where nobody takes turns
SOON = 0.2


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "gpu.lock"


def started(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_held(path) -> bool:
    """Whether another than the caller has locked the file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_they_prepare_side_by_side(path):
    with Turns(path) as first, Turns(path) as second:
        first.prepare()
        second.prepare()
        second.prepare()  # as often as one likes


@pytest.mark.parametrize("first_times", [True, False])
def test_nobody_prepares_while_one_times_and_the_other_way_round(path, first_times):
    done = threading.Event()

    def work():
        with Turns(path) as second:
            if first_times:
                second.prepare()
                done.set()
            else:
                with second.alone():
                    done.set()

    with Turns(path) as first:
        first.prepare()
        if first_times:
            with first.alone():
                thread = started(work)
                assert not done.wait(SOON)
        else:
            thread = started(work)
            assert not done.wait(SOON)
    thread.join(10)
    assert done.is_set()


def test_those_that_wait_for_each_other_come_in_turn(path):
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
        waiting.wait()
        while not is_held(path.with_name(f"{path.name}.gate")):  # then the second waits for the first
            sleep(0.001)
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


@pytest.mark.slow
@pytest.mark.parametrize("holds", ["turns.prepare()", "timing = turns.alone(); timing.__enter__()"])
def test_a_process_that_is_killed_keeps_nobody_waiting(path, holds):
    code = f"""
import sys, time
from pathlib import Path
from toma_lab.bench.turns import Turns
turns = Turns(Path(sys.argv[1])).__enter__()
{holds}
print("ready", flush=True)
time.sleep(60)
"""
    timed = threading.Event()

    def time():
        with Turns(path) as turns:
            turns.prepare()
            with turns.alone():
                timed.set()

    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        thread = started(time)
        assert not timed.wait(SOON)
        other.send_signal(signal.SIGKILL)
    thread.join(10)
    assert timed.is_set()


def test_without_a_file_nobody_waits():
    with Turns() as first, Turns() as second, first.alone(), second.alone():
        second.prepare()
