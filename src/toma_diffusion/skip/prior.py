"""How the output of a skipped step is predicted if nothing was learned on the model.

The clean image that the last computed step saw is held, and so is the noise. A solver of first order then makes the
same step over all skipped ones that it would make if it were called on the computed timesteps alone.

What held outputs had got wrong at the last computed step is then added, as far as it will go on: a line in the
logarithm of signal to noise, damped by the distance. A whole line is no safe guess: over short distances it is better
on every network, over long ones worse on most (docs/skip.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from toma_diffusion.skip.learned import Weights
from toma_diffusion.skip.levels import FLOW, IMAGE, NOISE, NOTHING, VELOCITY, Levels

LAST = Weights()
"""The last output, as it was."""
REACH = 1.0
"""The share of the line falls with the distance, in the logarithm of signal to noise, to nothing at this one. The best
share falls from 0.7 at a distance of 0.2 to 0.3 at 1 on two demo models: what is taken is less, or about as much."""


def needs(levels: Levels | None) -> tuple[int, bool]:
    """How many outputs must be kept, and whether the sample of the last computed step."""
    if levels is None:
        return 1, False
    return (1, True) if levels.holds_image else (2, levels.prediction == VELOCITY)


def predicted(levels: Levels | None, computed: Sequence[int], now: int) -> Weights:
    """The weights with which step `now` is predicted. `computed` are the last computed steps, the latest first."""
    last = computed[0]
    if levels is None or max(last, now) >= len(levels.angles):
        return LAST
    if levels.holds_image:
        return _image_held(levels, levels.angles[last], levels.angles[now])
    base = _held(levels, last, now)
    share = _share_of_line(levels, computed[1], last, now) if len(computed) > 1 else 0.0
    if not share:
        return base
    # The error of the prediction at the last computed step: its output less what was predicted from the one before.
    wrong = _held(levels, computed[1], last)
    return Weights(
        (base.outputs[0] + share, -share * wrong.outputs[0]), base.sample, base.last_sample - share * wrong.sample
    )


def _held(levels: Levels, last: int, now: int) -> Weights:
    """Noise and image are held."""
    turn = levels.angles[now] - levels.angles[last]
    if levels.prediction == VELOCITY and math.cos(turn) > 0:
        # The prediction turns with the angle; where it turns to follows from the sample that the solver has reached.
        return Weights((1 / math.cos(turn),), sample=-levels.sign * math.tan(turn))
    return LAST


def _share_of_line(levels: Levels, before: int, last: int, now: int) -> float:
    """How much of the last step's error is added; 0: none."""
    if levels.prediction == IMAGE:
        return 0.0
    first, second, third = (levels.log_signal_to_noise[step] for step in (before, last, now))
    if not (math.isfinite(first) and first < second < third < first + REACH):
        return 0.0
    share = (third - second) / (second - first) * max(0.0, 1 - (third - first) / REACH)
    if levels.prediction == NOISE:  # the same error of the image is less of the noise where there is more noise
        share *= math.cos(levels.angles[now]) / math.cos(levels.angles[last])
    return share


def _image_held(levels: Levels, before: float, after: float) -> Weights:
    """The image of the last computed step is held. The noise is what the sample now holds besides it."""
    sine, cosine = math.sin(after), math.cos(after)
    if sine < NOTHING or (levels.prediction == NOISE and math.cos(before) < NOTHING):
        return LAST
    if levels.prediction == NOISE:
        ratio = cosine / math.cos(before)
        return Weights((ratio * math.sin(before) / sine,), 1 / sine, -ratio / sine)
    if levels.prediction == VELOCITY:
        sample, last_sample = cosine / sine, -math.cos(before) / sine
        return Weights((math.sin(before) / sine,), levels.sign * sample, levels.sign * last_sample)
    if levels.prediction == FLOW:
        sigma, last_sigma = (math.sin(each) / (math.sin(each) + math.cos(each)) for each in (after, before))
        return Weights((last_sigma / sigma,), levels.sign / sigma, -levels.sign / sigma)
    return LAST
