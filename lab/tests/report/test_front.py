"""The front of the best points."""

from toma_lab.report.front import Point, front


def test_no_point_on_it_is_beaten_in_both():
    slow, middle, fast = Point(1.2, 0.01), Point(1.5, 0.05), Point(2.0, 0.2)
    beaten = [Point(1.1, 0.02), Point(1.5, 0.06), Point(1.9, 0.3), Point(2.0, 0.21)]
    assert front([*beaten, fast, slow, middle]) == [slow, middle, fast]


def test_what_saves_nothing_is_not_on_it():
    assert front([Point(1.0, 0.001), Point(0.9, 0.0005)]) == []
