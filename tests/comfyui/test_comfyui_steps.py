"""Which step and which pass a call is, and how long steps took. Without ComfyUI."""

from uuid import UUID, uuid4

import pytest
import torch

from toma_diffusion.comfyui.place import Place, PlaceReader, missing, parts_of, step_of
from toma_diffusion.comfyui.report import MERGED, SKIPPED, WHOLE, StepTimes

Pass = tuple[float, list[int], list[UUID]]
"""A noise level, and the entries `cond_or_uncond` and `uuids`."""


def read(reader: PlaceReader, schedule: torch.Tensor, *calls: Pass) -> list[Place]:
    """The places of the passes of one evaluation."""
    reader.begin_evaluation()
    return [
        reader.read(
            {
                "sample_sigmas": schedule,
                "sigmas": torch.tensor([level]),
                "cond_or_uncond": kinds,
                "uuids": conditionings,
            }
        )
        for level, kinds, conditionings in calls
    ]


class TestPlace:
    SCHEDULE = torch.tensor([14.6, 7.0, 3.0, 1.0, 0.0])

    def places(self, *evaluations: list[Pass]) -> list[tuple[int, int]]:
        reader = PlaceReader()
        found = [place for each in evaluations for place in read(reader, self.SCHEDULE, *each)]
        assert {place.num_steps for place in found} == {4}
        assert [place.begins for place in found] == [True] + [False] * (len(found) - 1)
        assert not any(place.repeats for place in found)
        return [(place.step, place.ordinal) for place in found]

    def test_one_batch_for_all_conditionings(self):
        both = [1, 0], [uuid4(), uuid4()]
        evaluations = [[(level, *both)] for level in self.SCHEDULE[:-1].tolist()]
        assert self.places(*evaluations) == [(0, 0), (1, 0), (2, 0), (3, 0)]

    def test_a_conditioning_keeps_its_number_in_whatever_order_it_comes(self):
        one, other = ([0], [uuid4()]), ([1], [uuid4()])
        evaluations = [(14.6, one), (14.6, other)], [(7.0, other), (7.0, one)], [(3.0, other)]
        calls = [[(level, *each) for level, each in evaluation] for evaluation in evaluations]
        assert self.places(*calls) == [(0, 0), (0, 1), (1, 1), (1, 0), (2, 1)]

    def test_one_conditioning_for_two_purposes(self):
        """As the area of a positive prompt that ComfyUI gives to the negative one too."""
        same = uuid4()
        left, right = ([0], [same]), ([1], [same])
        assert self.places([(14.6, *left), (14.6, *right)], [(7.0, *right)]) == [(0, 0), (0, 1), (1, 1)]

    def test_a_batch_and_its_halves_are_other_passes(self):
        both, one, other = ([1, 0], [uuid4(), uuid4()]), ([0], [uuid4()]), ([1], [uuid4()])
        calls = [(14.6, *both)], [(7.0, *one), (7.0, *other)], [(3.0, *both)]
        assert self.places(*calls) == [(0, 0), (1, 1), (1, 2), (2, 0)]

    @pytest.mark.parametrize(
        ("levels", "expected"),
        [
            ((14.6, 10.0, 7.0, 4.6), [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, True)]),  # in between
            ((14.6, 7.0, 7.0, 3.0), [(0, 0, False), (1, 0, False), (1, 1, True), (2, 0, False)]),  # looking ahead
        ],
    )
    def test_a_second_evaluation_in_a_step(self, levels, expected):
        reader, one = PlaceReader(), ([0], [uuid4()])
        places = [read(reader, self.SCHEDULE, (level, *one))[0] for level in levels]
        assert [(place.step, place.ordinal, place.repeats) for place in places] == expected

    def test_an_evaluation_that_is_made_again(self):
        reader, one, other = PlaceReader(), ([0], [uuid4()]), ([0], [uuid4()])
        first = read(reader, self.SCHEDULE, (14.6, *one), (14.6, *one), (14.6, *other))
        assert reader.passes == {0, 1, 2}
        reader.repeat_evaluation()
        options = {"sample_sigmas": self.SCHEDULE, "sigmas": torch.tensor([14.6]), "cond_or_uncond": [0]}
        again = [reader.read(options | {"uuids": each[1]}) for each in (one, one, other)]
        assert [place.ordinal for place in again] == [place.ordinal for place in first]
        assert not any(place.repeats for place in again)

    @pytest.mark.parametrize("level", [7.0 * (1 + 1e-7), 7.0 * (1 - 1e-7), 7.0])
    def test_rounding(self, level):
        assert step_of(level, self.SCHEDULE.tolist()) == 1

    @pytest.mark.parametrize(("level", "step"), [(20.0, 0), (14.6, 0), (0.5, 3), (0.0, 3)])
    def test_levels_outside(self, level, step):
        assert step_of(level, self.SCHEDULE.tolist()) == step

    def test_a_schedule_that_adds_noise(self):
        levels = self.SCHEDULE.flip(0).tolist()
        assert [step_of(level, levels) for level in (0.0, 1.0, 2.0, 3.0, 7.0)] == [0, 1, 1, 2, 3]

    def test_going_back_or_another_schedule_begins_anew(self):
        reader, one = PlaceReader(), ([0], [uuid4()])
        places = [read(reader, self.SCHEDULE, (level, *one))[0] for level in (14.6, 3.0, 7.0)]
        places += read(reader, torch.tensor([7.0, 0.0]), (7.0, *one))
        assert [(place.step, place.num_steps, place.begins) for place in places] == [
            (0, 4, True),
            (2, 4, False),
            (1, 4, True),
            (0, 1, True),
        ]

    def test_parts_only_where_they_are_the_same_pictures(self):
        assert [parts_of(kinds) for kinds in ([0], [1, 0], [0, 0], [1, 0, 0], [2, 1, 0])] == [1, 2, 1, 1, 3]

    def test_what_is_missing_is_named(self):
        assert missing({"sigmas": 1, "uuids": [1]}) == ["sample_sigmas", "cond_or_uncond"]


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
