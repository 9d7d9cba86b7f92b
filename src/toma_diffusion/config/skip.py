"""Settings of skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from toma_diffusion.config.checks import check_integer, check_known, check_sequence, is_number
from toma_diffusion.errors import UsageError


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
class Learned:
    """Weights that were learned on a model, and what they are for. Anything else is refused."""

    num_steps: int
    scheduler: str
    """The name of its class."""
    guidance: float | None
    """The guidance scale; None if the pipeline has none that is known."""
    weights: Mapping[int, tuple[Weights, ...]]
    """By the skipped step: those of every pass over it, such as the two halves of guidance."""

    def __post_init__(self) -> None:
        plain = {
            int(step): tuple(each if isinstance(each, Weights) else Weights(**each) for each in passes)
            for step, passes in self.weights.items()
        }
        object.__setattr__(self, "weights", plain)
        object.__setattr__(self, "num_steps", check_integer("num_steps", self.num_steps, minimum=2))

    @classmethod
    def from_dict(cls, values: Any) -> Learned:
        """From fields by name, as a file holds them."""
        try:
            return cls(**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"learned={values!r} is not complete ({error}): learn again with handle.learn or `toma learn`."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has."""
        weights = {
            str(step): [vars(each) | {"outputs": list(each.outputs)} for each in passes]
            for step, passes in self.weights.items()
        }
        return vars(self) | {"weights": weights}

    @property
    def needs_last_sample(self) -> bool:
        """Whether the sample of the last computed step is kept too."""
        return any(each.last_sample for passes in self.weights.values() for each in passes)

    @property
    def depth(self) -> int:
        """How many outputs are kept."""
        return max((len(each.outputs) for passes in self.weights.values() for each in passes), default=1)

    @property
    def passes(self) -> int:
        """Over a step."""
        return max(map(len, self.weights.values()), default=1)


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Which steps are computed. In the others the denoiser does not run: its output is predicted. Immutable.

    Example:

    ```python
    >>> from toma_diffusion import Skip, ToMAConfig
    >>> config = ToMAConfig(ratio=0, skip=Skip(computed=8))
    >>> ToMAConfig.from_json(config.to_json()).skip.computed
    8
    ```
    """

    computed: float | int | tuple[int, ...] = 0.5
    """What is computed: a share of the steps, such as 0.4; their number, such as 8; or the steps themselves, counted
    from 0, such as (0, 1, 2, 4, 7). A share or a number is spread by the noise levels of the scheduler. Fewer is faster
    and loses more detail."""

    fewest: int = 1
    """With a share: at least so many steps are computed, but at least one is skipped. The fewer steps a generation has,
    the more outputs differ from one to the next. Each preset has a number of its own."""

    min_steps: int = 1
    """In generations of fewer steps nothing is skipped."""

    learned: Learned | None = None
    """The weights of skipped steps, if they were learned on the model: see `handle.learn`. None: they follow from the
    noise levels of the scheduler."""

    def __post_init__(self) -> None:
        self._set("computed", self._valid_computed())
        self._set("fewest", check_integer("fewest", self.fewest, minimum=1))
        self._set("min_steps", check_integer("min_steps", self.min_steps, minimum=1))
        if self.learned is not None and not isinstance(self.learned, Learned):
            self._set("learned", Learned.from_dict(self.learned))
        if self.learned is not None:
            self._check_learned(self.learned)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Skip:
        """From fields by name. Missing ones take their defaults, unknown ones raise `UsageError`."""
        if not isinstance(values, Mapping):
            raise UsageError(f"skip={values!r} is not allowed: pass a Skip, a mapping of its fields, or None.")
        check_known(cls.__name__, values, SKIP_FIELDS)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that JSON has."""
        computed = list(self.computed) if isinstance(self.computed, tuple) else self.computed
        return vars(self) | {"computed": computed, "learned": None if self.learned is None else self.learned.to_dict()}

    def _valid_computed(self) -> float | int | tuple[int, ...]:
        given: Any = self.computed
        if is_number(given):
            if isinstance(given, int):
                return check_integer("computed", given, minimum=1)
            if 0 < given < 1:
                return float(given)
            raise UsageError(
                f"computed={given!r} is not allowed: a share of the steps is above 0 and below 1; a number of steps is "
                "a whole number."
            )
        steps = check_sequence("computed", given, "a share of the steps, their number, or the steps, counted from 0")
        steps = tuple(sorted({check_integer("computed", step, minimum=0) for step in steps}))
        if not steps or steps[0] != 0:
            raise UsageError(f"computed={given!r} lacks step 0: nothing can be predicted in the first step.")
        return steps

    def _check_learned(self, learned: Learned) -> None:
        if not isinstance(self.computed, tuple):
            raise UsageError(
                f"computed={self.computed!r} cannot go with learned weights, which are for certain steps: leave "
                "computed out, or learn again."
            )
        skipped = set(range(learned.num_steps)) - set(self.computed)
        if skipped != set(learned.weights):
            raise UsageError(
                f"computed={self.computed!r} skips steps {sorted(skipped)} of {learned.num_steps}, but weights were "
                f"learned for {sorted(learned.weights)}: leave computed out, or learn again."
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; only __post_init__ normalises values


SKIP_FIELDS = tuple(field.name for field in fields(Skip))
