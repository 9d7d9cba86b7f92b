"""Which step and which pass a call is, and how long steps took. Without ComfyUI."""

from uuid import uuid4

import pytest
import torch

from toma_diffusion.comfyui.place import Place, PlaceReader, parts_of, step_of
from toma_diffusion.comfyui.report import MERGED, SKIPPED, WHOLE, StepTimes

SCHEDULE = torch.tensor([14.6, 7.0, 3.0, 1.0, 0.0])
ONE, OTHER = uuid4(), uuid4()
POSITIVE, NEGATIVE = ([0], [ONE]), ([1], [OTHER])
BOTH = [1, 0], [OTHER, ONE]
"""Passes: `cond_or_uncond` and `uuids`."""


def read(reader: PlaceReader, level: float, *passes, schedule: torch.Tensor = SCHEDULE) -> list[Place]:
    """The places of the passes of one evaluation by the sampler."""
    reader.begin_evaluation()
    options = {"sample_sigmas": schedule, "sigmas": torch.tensor([level])}
    return [reader.read(options | {"cond_or_uncond": kinds, "uuids": uuids}) for kinds, uuids in passes]


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [
        pytest.param(
            [(14.6, BOTH), (7.0, BOTH), (3.0, BOTH), (1.0, BOTH)],
            [(0, 0), (1, 0), (2, 0), (3, 0)],
            id="one batch for all conditionings",
        ),
        pytest.param(
            [(14.6, POSITIVE, NEGATIVE), (7.0, NEGATIVE, POSITIVE), (3.0, NEGATIVE)],
            [(0, 0), (0, 1), (1, 1), (1, 0), (2, 1)],
            id="a conditioning keeps its number in whatever order it comes",
        ),
        pytest.param(  # as the area of a positive prompt that ComfyUI gives to the negative one too
            [(14.6, POSITIVE, ([1], [ONE])), (7.0, ([1], [ONE]))],
            [(0, 0), (0, 1), (1, 1)],
            id="one conditioning for two purposes",
        ),
        pytest.param(
            [(14.6, BOTH), (7.0, POSITIVE, NEGATIVE), (3.0, BOTH)],
            [(0, 0), (1, 1), (1, 2), (2, 0)],
            id="a batch and its halves are other passes",
        ),
    ],
)
def test_passes(evaluations, expected):
    reader = PlaceReader()
    found = [place for level, *passes in evaluations for place in read(reader, level, *passes)]
    assert [(place.step, place.pass_index) for place in found] == expected
    assert {place.num_steps for place in found} == {4}
    assert [place.begins for place in found] == [True] + [False] * (len(found) - 1)
    assert not any(place.repeats for place in found)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((14.6, 10.0, 7.0, 4.6), [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)]),
        ((14.6, 7.0, 7.0, 3.0), [(0, 0, False), (1, 0, False), (1, 1, True), (2, 0, False)]),
    ],
    ids=["in between", "looking ahead"],
)
def test_a_second_evaluation_in_a_step(levels, expected):
    reader = PlaceReader()
    places = [read(reader, level, POSITIVE)[0] for level in levels]
    assert [(place.step, place.pass_index, place.repeats) for place in places] == expected


def test_an_evaluation_that_is_made_again():
    reader, passes = PlaceReader(), (POSITIVE, POSITIVE, NEGATIVE)
    first = read(reader, 14.6, *passes)
    assert reader.passes == {0, 1, 2}
    reader.repeat_evaluation()
    options = {"sample_sigmas": SCHEDULE, "sigmas": torch.tensor([14.6])}
    again = [reader.read(options | {"cond_or_uncond": kinds, "uuids": uuids}) for kinds, uuids in passes]
    assert [place.pass_index for place in again] == [place.pass_index for place in first]
    assert not any(place.repeats for place in again)


def test_going_back_or_another_schedule_begins_anew():
    reader = PlaceReader()
    places = [read(reader, level, POSITIVE)[0] for level in (14.6, 3.0, 7.0)]
    places += read(reader, 7.0, POSITIVE, schedule=torch.tensor([7.0, 0.0]))
    assert [(place.step, place.begins) for place in places] == [(0, True), (2, False), (1, True), (0, True)]


@pytest.mark.parametrize(
    ("level", "step"),
    [(7.0 * (1 + 1e-7), 1), (7.0 * (1 - 1e-7), 1), (7.0, 1), (20.0, 0), (14.6, 0), (0.5, 3), (0.0, 3)],
)
def test_noise_levels(level, step):
    """They are rounded, and may be outside of the schedule."""
    assert step_of(level, SCHEDULE.tolist()) == step


def test_a_schedule_that_adds_noise():
    levels = SCHEDULE.flip(0).tolist()
    assert [step_of(level, levels) for level in (0.0, 1.0, 2.0, 3.0, 7.0)] == [0, 1, 1, 2, 3]


def test_parts_only_where_they_are_the_same_pictures():
    assert [parts_of(kinds) for kinds in ([0], [1, 0], [0, 0], [1, 0, 0], [2, 1, 0])] == [1, 2, 1, 1, 3]


class TestTimes:
    def times(self, monkeypatch, *steps: tuple[float, str]) -> StepTimes:
        now = [0.0]
        monkeypatch.setattr("time.perf_counter", lambda: now[0])
        times = StepTimes()
        for seconds, *kinds in steps:
            times.begin_step()
            for kind in kinds:
                times.note(kind)
            now[0] += seconds
        times.end()
        return times

    def test_saved_time(self, monkeypatch):
        steps = [(9.0, WHOLE), (2.0, WHOLE), (1.0, MERGED), (0.5, SKIPPED), (77.0, SKIPPED)]
        assert self.times(monkeypatch, *steps).lines() == [
            "steps: 2 whole, 1 merged, 2 skipped",
            "a whole step took 2.000 s on average",
            "a merged step took 1.000 s on average",
            "a skipped step took 0.500 s on average",
            # 2 + 2 + 1 + 0.5 + 0.5 seconds instead of five steps of 2
            "time saved: about 4.00 s of 10.00 s (40%)",
        ]

    def test_without_a_whole_step_it_is_not_known(self, monkeypatch):
        assert "not known" in self.times(monkeypatch, *[(1.0, MERGED)] * 3).lines()[-1]

    def test_a_step_of_several_kinds(self, monkeypatch):
        times = self.times(monkeypatch, (1.0, WHOLE), (1.0, MERGED, SKIPPED, WHOLE))
        assert times.lines()[0] == "steps: 1 whole, 1 skipped"

    def test_a_step_that_is_made_again(self):
        times = StepTimes()
        times.begin_step()
        times.note(SKIPPED)
        times.repeat_step()
        times.note(WHOLE)
        times.end()
        assert times.lines() == ["steps: 1 whole"]

    def test_nothing(self):
        assert StepTimes().lines() == ["no step was made"]
