"""How the output of a skipped step is predicted if nothing was learned on the model.

The clean image that the last computed step saw is held, and so is the noise. A solver of first order then makes the
same step over all skipped ones that it would make if it were called on the computed timesteps alone. A line through the
last two outputs is no safe guess: it is best on one network and worst on another (docs/reuse.md).
"""

from __future__ import annotations

import math

from toma_diffusion.config import Weights
from toma_diffusion.skip.levels import FLOW, NOISE, VELOCITY, Levels

LAST = Weights()
"""The last output, as it was."""


def held(levels: Levels | None, last: int, now: int) -> Weights:
    """The weights with which step `now` is predicted from `last`, the last step that was computed."""
    if levels is None or max(last, now) >= len(levels.angles):
        return LAST
    before, after = levels.angles[last], levels.angles[now]
    if levels.holds_image:
        return _image_held(levels, before, after)
    if levels.prediction == VELOCITY and math.cos(after - before) > 0:
        # The prediction turns with the angle; where it turns to follows from the sample that the solver has reached.
        turn = after - before
        return Weights((1 / math.cos(turn),), sample=-levels.sign * math.tan(turn))
    return LAST


def _image_held(levels: Levels, before: float, after: float) -> Weights:
    """The image of the last computed step is held. The noise is what the sample now holds besides it."""
    sine, cosine = math.sin(after), math.cos(after)
    if sine <= 0 or (levels.prediction == NOISE and math.cos(before) <= 0):
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
