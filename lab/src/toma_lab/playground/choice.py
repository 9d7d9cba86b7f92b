"""What a user chooses on the page: a method with two of its settings, and the picture; in words, and as code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from toma_diffusion import Merge, Skip, UsageError
from toma_diffusion.checks import check_integer
from toma_diffusion.merge.schedule import Schedule
from toma_diffusion.merge.variants import VARIANTS
from toma_diffusion.others import ToDo, ToFu, ToMeSD
from toma_diffusion.presets import PRESETS
from toma_lab.columns.ours import Ours, OurSpec
from toma_lab.pipelines.generation import ImageRequest

NAMES = (*PRESETS, *VARIANTS, "tomesd", "tofu", "todo")
"""Presets, variants of ToMA, and other methods."""
MOST_STEPS = 200
"""A picture of more would keep the machine busy for long, and others on the page waiting."""
COMPUTED, MERGED, SKIPPED = "computed", "merged", "skipped"
"""What a step may be."""


@dataclass(frozen=True)
class Choice:
    """A preset, a variant of ToMA or another method, with the ratio and the number of computed steps of the page."""

    name: str
    own: Ours

    @classmethod
    def of(cls, name: str, ratio: float | None, computed: float | None, steps: int) -> Choice:
        """From the controls of the page, which always show a value. What a method does anyway is not a change."""
        if ratio is None or computed is None:
            raise UsageError(
                "the ratio or the number of computed steps is empty: give one, or choose the method again."
            )
        own = OurSpec.parse(name).ours()
        usual_ratio, usual_count = usual(name, steps)
        count = min(check_integer("computed steps", computed, minimum=1), steps)
        if (ratio, count) == (usual_ratio, usual_count):
            return cls(name, own)
        merge, skip = own.at(steps)
        if ratio != usual_ratio:
            merge = None if ratio == 0 else replace(merge or Merge(), ratio=ratio)
        if count != usual_count:
            skip = None if count == steps else Skip(computed=count)
        if merge is None and skip is None:
            raise UsageError("a ratio of 0 with all steps computed changes nothing: remove tokens, or skip steps.")
        return cls(name, Ours(None, merge, skip))

    def in_words(self, steps: int) -> str:
        return " ".join(self.own.in_sentences(steps)) or f"Nothing is done in {steps} steps."

    def steps_of(self, steps: int, computed: Sequence[int] | None = None) -> tuple[str, ...]:
        """What each of so many steps is, if those are computed; None: as planned."""
        merge = self.own.at(steps).merge
        schedule = None if merge is None else Schedule.from_config(merge)
        which = self.own.computed(steps) if computed is None else computed

        def kind(step: int) -> str:
            if step not in which:
                return SKIPPED
            return COMPUTED if schedule is None or schedule.action(step, steps) is None else MERGED

        return tuple(kind(step) for step in range(steps))


def usual(name: str, steps: int) -> tuple[float, int]:
    """Ratio and number of computed steps that a method has by itself, in so many steps. Ratio 0: nothing is merged."""
    merge, skip = OurSpec.parse(name).ours().at(steps)
    return 0.0 if merge is None else merge.ratio, steps if skip is None else skip.count(steps)


def request_of(prompt: str | None, seed: float | None, steps: float | None, guidance: float | None) -> ImageRequest:
    """The picture to generate, from fields that may be empty."""
    if not prompt or not prompt.strip():
        raise UsageError("the prompt is empty: describe the picture.")
    if seed is None or steps is None:
        raise UsageError(f"the {'seed' if seed is None else 'number of steps'} is empty: give a whole number.")
    count = check_integer("steps", steps, minimum=1)
    if count > MOST_STEPS:
        raise UsageError(f"steps={count} is not allowed on this page: it must be {MOST_STEPS} or less.")
    return ImageRequest(prompt.strip(), check_integer("seed", seed), count, guidance)


PROGRAM = """\
{imports}from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.generation import ImageRequest, generate_image

pipe = load_pipeline({load})
handle = speed_up(pipe, {settings})
request = ImageRequest({request})
image = generate_image(pipe, request)
image.save("toma.png")
"""


def as_code(model: str, device: str, dtype: str | None, request: ImageRequest, choice: Choice) -> str:
    """A program that writes the accelerated picture to `toma.png`."""
    own, guidance = choice.own, {} if request.guidance is None else {"guidance": request.guidance}
    given = {name: value for name, value in (("merge", own.merge), ("skip", own.skip)) if value is not None}
    names = ", ".join(sorted({type(each).__name__ for each in given.values() if isinstance(each, Merge | Skip)}))
    imports = f"from toma_diffusion import {f'{names}, ' if names else ''}speed_up\n"
    if isinstance(own.merge, ToMeSD | ToFu | ToDo):
        imports += f"from toma_diffusion.others import {type(own.merge).__name__}\n"
    return PROGRAM.format(
        imports=imports,
        load=_arguments(model, device=device, **{} if dtype is None else {"dtype": dtype}),
        settings=_arguments(*[] if own.preset is None else [own.preset], **given),
        request=_arguments(request.prompt, seed=request.seed, steps=request.steps, **guidance),
    )


def _arguments(*first: Any, **named: Any) -> str:
    return ", ".join([*map(_literal, first), *(f"{name}={_literal(value)}" for name, value in named.items())])


def _literal(value: Any) -> str:
    """Texts in double quotes: what JSON escapes, Python escapes alike. Of settings what is not the default."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not hasattr(value, "to_dict"):
        return repr(value) if value != float("inf") else '"inf"'
    changed = {each.name: getattr(value, each.name) for each in fields(value)}
    changed = {name: each for name, each in changed.items() if each != getattr(type(value), name)}
    return f"{type(value).__name__}({_arguments(**changed)})"
