"""What a user chooses on the page: a method with two of its settings, and the picture to generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toma_diffusion.checks import check_integer, check_number
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Config
from toma_diffusion.others import named_config
from toma_lab.evaluation.plan import Variant
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.tune.setting import in_sentences

MOST_STEPS = 200
"""A picture of more would keep the machine busy for long, and others on the page waiting."""
ALL = 0
"""In place of a number of computed steps: none is skipped."""


@dataclass(frozen=True)
class Choice:
    """A preset or another method, and what is changed in it."""

    method: str
    ratio: float | None = None
    """Fraction of the tokens to remove. None: that of the method."""
    computed: int | None = None
    """How many steps are computed; the others are skipped. 0: all. None: that of the method."""

    @classmethod
    def of(cls, method: str, ratio: float | None, computed: float | None, steps: int) -> Choice:
        """From the controls of the page, which always show a value: one that the method has anyway is not a change."""
        own = named_config(method, {})
        if ratio is None or computed is None:
            raise UsageError(
                "the ratio or the number of computed steps is empty: give one, or choose the method again."
            )
        changed_ratio = None if ratio == own.ratio else ratio
        count = min(check_integer("computed steps", computed, minimum=1), steps)
        if count == count_computed(own, steps):
            return cls(method, changed_ratio)
        return cls(method, changed_ratio, ALL if count == steps else count)

    @property
    def overrides(self) -> dict[str, Any]:
        """The arguments of `apply_toma` after the name of the method."""
        changes: dict[str, Any] = {} if self.ratio is None else {"ratio": self.ratio}
        if self.computed == ALL:
            return changes | {"skip": None}
        return changes if self.computed is None else changes | {"computed": self.computed}

    @property
    def config(self) -> Config:
        """Its settings, without the defaults of a model family. Raises `UsageError` if one is wrong."""
        config = named_config(self.method, self.overrides)
        if config.ratio == 0 and config.skip is None:
            raise UsageError("a ratio of 0 with all steps computed changes nothing: remove tokens, or skip steps.")
        return config

    def unused(self, steps: int) -> list[str]:
        """What was changed and has no effect in a generation of so many steps."""
        config, found = self.config, list[str]()
        if self.ratio and config.max_steps is not None and steps > config.max_steps:
            found.append(
                f"The ratio has no effect: {self.method} merges tokens only in generations of {config.max_steps} steps "
                "or fewer. Try toma-stage or toma-late."
            )
        if self.computed and config.skip is not None and steps < config.skip.min_steps:
            found.append(
                f"The number of computed steps has no effect: {self.method} skips steps only in generations of "
                f"{config.skip.min_steps} or more."
            )
        return found

    def in_words(self, steps: int) -> str:
        """What it does, in sentences."""
        return " ".join(in_sentences(Variant(self.method, self.config), steps))


def count_computed(config: Config, steps: int) -> int:
    """How many of so many steps are computed."""
    return steps if config.skip is None else config.skip.count(steps)


def request_of(prompt: str | None, seed: float | None, steps: float | None, guidance: float | None) -> ImageRequest:
    """The picture to generate, from fields that may be empty."""
    if not prompt or not prompt.strip():
        raise UsageError("the prompt is empty: describe the picture.")
    if seed is None or steps is None:
        raise UsageError(f"the {'seed' if seed is None else 'number of steps'} is empty: give a whole number.")
    count = check_integer("steps", steps, minimum=1)
    if count > MOST_STEPS:
        raise UsageError(f"steps={count} is not allowed on this page: it must be {MOST_STEPS} or less.")
    if guidance is not None:
        guidance = check_number("guidance", guidance, "from 0 to 100", lambda scale: 0 <= scale <= 100)
    return ImageRequest(prompt.strip(), check_integer("seed", seed), count, guidance)
