"""What the controls of the page stand for."""

import pytest
from toma_lab.playground.choice import ALL, MOST_STEPS, Choice, count_computed, request_of

from toma_diffusion import METHODS, PRESETS, UsageError
from toma_diffusion.others import named_config


@pytest.mark.parametrize("method", [*PRESETS, *METHODS])
def test_the_values_that_a_method_has_anyway_change_nothing(method):
    own = named_config(method, {})
    for steps in (20, 4, 1):
        choice = Choice.of(method, own.ratio, count_computed(own, steps), steps)
        assert choice.overrides == {}
        assert choice.config == own
        assert choice.in_words(steps)


@pytest.mark.parametrize(
    ("method", "ratio", "computed", "overrides"),
    [
        ("toma-stage", 0.25, 20, {"ratio": 0.25}),
        ("toma-stage", 0.5, 7, {"computed": 7}),
        ("fast", 0.5, 10, {"ratio": 0.5, "computed": 10}),
        ("balanced", 0.5, 20, {"skip": None}),
    ],
)
def test_only_changes_are_passed_on(method, ratio, computed, overrides):
    choice = Choice.of(method, ratio, computed, 20)
    assert choice.overrides == overrides
    assert choice.config.ratio == ratio
    assert count_computed(choice.config, 20) == computed


def test_more_computed_steps_than_there_are_mean_all():
    """The slider may show the number of a longer generation for a moment."""
    assert Choice.of("fast", 0.5, 20, 8) == Choice("fast", ratio=0.5, computed=ALL)
    assert Choice.of("toma-stage", 0.5, 20, 8) == Choice("toma-stage")


def test_settings_that_change_nothing_are_refused():
    with pytest.raises(UsageError, match="changes nothing"):
        _ = Choice.of("fast", 0.0, 20, 20).config


def test_an_empty_number_is_refused():
    with pytest.raises(UsageError, match="is empty"):
        Choice.of("fast", None, 2, 20)
    with pytest.raises(UsageError, match="is empty"):
        Choice.of("fast", 0.5, None, 20)


def test_a_change_without_effect_is_said():
    assert "merges tokens only in generations of 4 steps" in Choice("balanced", ratio=0.75).unused(20)[0]
    assert "skips steps only in generations of 5" in Choice("balanced", computed=3).unused(4)[0]
    assert Choice("balanced", ratio=0.75).unused(4) == []
    assert Choice("toma-stage", ratio=0.75).unused(20) == []


def test_a_request():
    request = request_of(" an apple ", 3, 12, None)
    assert (request.prompt, request.seed, request.steps, request.guidance) == ("an apple", 3, 12, None)


@pytest.mark.parametrize(
    ("prompt", "seed", "steps", "guidance", "message"),
    [
        ("  ", 0, 20, None, "the prompt is empty"),
        (None, 0, 20, None, "the prompt is empty"),
        ("x", None, 20, None, "the seed is empty"),
        ("x", 0, None, None, "the number of steps is empty"),
        ("x", 0, 0, None, "steps=0 is not allowed"),
        ("x", 0, MOST_STEPS + 1, None, f"steps={MOST_STEPS + 1} is not allowed on this page"),
        ("x", 2**70, 20, None, f"seed={2**70} is not allowed"),
        ("x", 0, 20, -1.0, "guidance=-1.0 is not allowed"),
        ("x", 0, 20, float("nan"), "guidance=nan is not allowed"),
    ],
)
def test_a_wrong_request_is_refused(prompt, seed, steps, guidance, message):
    with pytest.raises(UsageError, match=message):
        request_of(prompt, seed, steps, guidance)
