"""What was learned of skipped steps on a model: which steps are computed, and how the others are predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toma_diffusion.checks import check_integer
from toma_diffusion.errors import UsageError
from toma_diffusion.files import read_json

FORMAT = 1
"""Of the file."""
LEARN_AGAIN = "learn again with handle.learn or `toma learn`"
SAME_ANGLE = 0.02
"""Noise levels that differ by less, in radians, are the same for weights that were learned."""


@dataclass(frozen=True)
class Weights:
    """How the output of a skipped step is put together: a sum with these weights."""

    outputs: tuple[float, ...] = (1.0,)
    """Of the outputs of the last computed steps, the latest first."""
    sample: float = 0.0
    """Of the noisy sample of the skipped step."""
    last_sample: float = 0.0
    """Of that of the last computed step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", tuple(map(float, self.outputs)))


@dataclass(frozen=True, kw_only=True)
class LearnedSteps:
    """For one number of computed steps: which they are, and the weights of the others."""

    computed: tuple[int, ...]
    weights: Mapping[int, tuple[Weights, ...]] = field(hash=False)
    """By the skipped step: those of every pass over it, such as the two halves of guidance. Also by computed steps that
    come after skipped ones: with their own output first, they take back what was predicted wrong."""
    distance: float | None = None
    """How far a generation that nothing was learned from is from the same one with all steps computed."""
    distance_before: float | None = None
    """The same with nothing learned."""

    def __post_init__(self) -> None:
        plain = {
            int(step): tuple(each if isinstance(each, Weights) else Weights(**each) for each in passes)
            for step, passes in self.weights.items()
        }
        computed = tuple(check_integer("computed", step, minimum=0) for step in self.computed)
        if not computed or computed[0] != 0 or list(computed) != sorted(set(computed)):
            raise UsageError(f"computed={computed!r} is not a list of steps, from 0 on: {LEARN_AGAIN}.")
        numbers = [
            number
            for passes in plain.values()
            for each in passes
            for number in (*each.outputs, each.sample, each.last_sample)
        ]
        if not all(map(math.isfinite, numbers)):
            raise UsageError(f"weights of computed={computed!r} are not finite: {LEARN_AGAIN}.")
        object.__setattr__(self, "computed", computed)
        object.__setattr__(self, "weights", plain)

    @property
    def count(self) -> int:
        return len(self.computed)

    @property
    def depth(self) -> int:
        return max((len(each.outputs) for passes in self.weights.values() for each in passes), default=1)

    @property
    def needs_last_sample(self) -> bool:
        """Whether the sample of the last computed step is kept too."""
        return any(each.last_sample for passes in self.weights.values() for each in passes)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What was learned on a model, and what it is for. Other models and other generations are refused."""

    model_class: str
    """Of the denoiser."""
    num_steps: int
    scheduler: str
    """The name of its class."""
    guidance: float | None
    """The guidance scale; None if the pipeline has none that is known."""
    passes: int = 0
    """Over a step, such as the halves of guidance. 0: not known."""
    angles: tuple[float, ...] = ()
    """The noise levels of all steps, as in `skip/levels.py`: settings of the scheduler and the size of pictures may
    change them. Empty: not known."""
    steps: tuple[LearnedSteps, ...] = field(default_factory=tuple)
    """For every number of computed steps that was learned, most first."""

    def __post_init__(self) -> None:
        given = (each if isinstance(each, LearnedSteps) else LearnedSteps(**each) for each in self.steps)
        steps = tuple(sorted(given, key=lambda each: -each.count))
        object.__setattr__(self, "num_steps", check_integer("num_steps", self.num_steps, minimum=2))
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "angles", tuple(round(float(angle), 6) for angle in self.angles))
        for each in steps:
            skipped = set(range(self.num_steps)) - set(each.computed)
            if not skipped or skipped != set(each.weights) - set(each.computed):
                raise UsageError(
                    f"computed={each.computed!r} skips steps {sorted(skipped)} of {self.num_steps}, but there are "
                    f"weights for {sorted(set(each.weights) - set(each.computed))}: {LEARN_AGAIN}."
                )

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of computed steps, most first."""
        return tuple(each.count for each in self.steps)

    def of(self, count: int) -> LearnedSteps:
        """What was learned for so many computed steps. Raises `UsageError` if nothing was."""
        found = next((each for each in self.steps if each.count == count), None)
        if found is None:
            known = " or ".join(map(str, self.counts)) or "no"
            raise UsageError(
                f"nothing was learned for {count} computed steps of {self.num_steps}, but for {known}: compute as "
                f"many, or {LEARN_AGAIN}."
            )
        return found

    def check(
        self,
        model_class: str,
        num_steps: int | None,
        scheduler: str,
        guidance: float | None,
        angles: Sequence[float],
    ) -> None:
        """Raise `UsageError` if it was learned for another model, or for another kind of generation.

        What is not known of a generation (an empty name, None, no angles) is not compared.
        """
        found = {
            "model": (self.model_class, model_class),
            "number of steps": (self.num_steps, num_steps),
            "scheduler": (self.scheduler, scheduler or self.scheduler),
            "guidance scale": (self.guidance, self.guidance if guidance is None else guidance),
        }
        differs = [f"{what} {now!r}, not {wanted!r}" for what, (wanted, now) in found.items() if now != wanted]
        pairs = list(zip(angles, self.angles, strict=False))
        if not differs and any(abs(one - other) >= SAME_ANGLE for one, other in pairs):
            differs = ["other noise levels, because of the size of the picture or a setting of the scheduler"]
        if differs:
            raise UsageError(
                "the weights of skipped steps were learned for other generations: this one has "
                f"{' and '.join(differs)}. Generate as they were learned, or {LEARN_AGAIN}."
            )

    @classmethod
    def from_any(cls, given: Any) -> Learned:
        """From what a user passes: the path of a file, or fields by name."""
        if isinstance(given, Learned):
            return given
        if isinstance(given, (str, Path)):
            return cls.read(given)
        if not isinstance(given, Mapping):
            raise UsageError(f"learned={given!r} is not allowed: pass the path of a file that `toma learn` wrote.")
        return cls._from_fields(given, "learned")

    @classmethod
    def read(cls, path: str | Path) -> Learned:
        """From a file. Raises `UsageError` if it is none of ours."""
        what = f"learned={str(path)!r}"
        values = read_json(path, what, "handle.save or `toma learn`")
        held = values.get("format") if isinstance(values, dict) else None
        if held != FORMAT or "steps" not in values:
            raise UsageError(
                f"{what} was not written by handle.save or `toma learn` of this version (its format is {held!r}, not "
                f"{FORMAT}): {LEARN_AGAIN}."
            )
        del values["format"]
        return cls._from_fields(values, what)

    @classmethod
    def _from_fields(cls, values: Mapping[str, Any], what: str) -> Learned:
        try:
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{what} is not complete ({error}): {LEARN_AGAIN}.") from error

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.to_dict()}) + "\n"
