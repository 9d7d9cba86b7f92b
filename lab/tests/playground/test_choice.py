"""What the controls of the page stand for."""

import pytest
from toma_lab.playground.choice import MOST_STEPS, NAMES, Choice, request_of, usual

from toma_diffusion import Merge, Skip, UsageError
from toma_diffusion.merge.variants import VARIANTS


@pytest.mark.parametrize("name", NAMES)
def test_the_values_that_a_method_has_anyway_change_nothing(name):
    for steps in (20, 4, 1):
        choice = Choice.of(name, *usual(name, steps), steps)
        assert choice.own.preset == (None if choice.own.merge else name)
        assert choice.in_words(steps)


@pytest.mark.parametrize(
    ("name", "ratio", "computed", "merge", "skip"),
    [
        ("toma-stage", 0.25, 20, Merge(ratio=0.25), None),
        ("toma-stage", 0.5, 7, Merge(), Skip(computed=7)),
        ("toma-late", 0.5, 7, VARIANTS["toma-late"], Skip(computed=7)),
        ("fast", 0.5, 10, Merge(), Skip(computed=10)),
        ("fast", 0.5, 20, Merge(), None),
        ("toma-stage", 0.0, 10, None, Skip(computed=10)),
    ],
)
def test_what_is_changed_takes_the_place_of_what_the_method_does(name, ratio, computed, merge, skip):
    own = Choice.of(name, ratio, computed, 20).own
    assert (own.preset, own.merge, own.skip) == (None, merge, skip)


def test_more_computed_steps_than_there_are_mean_all():
    """The slider may show the number of a longer generation for a moment."""
    assert Choice.of("toma-stage", 0.5, 20, 8) == Choice.of("toma-stage", 0.5, 8, 8)


@pytest.mark.parametrize(
    ("ratio", "computed", "message"),
    [(0.0, 20, "changes nothing"), (None, 2, "is empty"), (0.5, None, "is empty"), (1.5, 20, "ratio=1.5")],
)
def test_what_cannot_be_is_refused(ratio, computed, message):
    with pytest.raises(UsageError, match=message):
        Choice.of("fast", ratio, computed, 20)


def test_a_request():
    request = request_of(" an apple ", 3, 12, None)
    assert (request.prompt, request.seed, request.steps, request.guidance) == ("an apple", 3, 12, None)


@pytest.mark.parametrize(
    ("prompt", "seed", "steps", "guidance", "message"),
    [
        ("  ", 0, 20, None, "the prompt is empty"),
        ("x", None, 20, None, "the seed is empty"),
        ("x", 0, None, None, "the number of steps is empty"),
        ("x", 0, MOST_STEPS + 1, None, f"steps={MOST_STEPS + 1} is not allowed on this page"),
        ("x", 0, 20, float("nan"), "guidance=nan is not allowed"),
    ],
)
def test_a_wrong_request_is_refused(prompt, seed, steps, guidance, message):
    with pytest.raises(UsageError, match=message):
        request_of(prompt, seed, steps, guidance)
