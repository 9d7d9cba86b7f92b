"""What is tried: settings of merging, of skipped steps, of both, of caches, and fewer steps.

A candidate is written as for `toma eval`. A percentage is a share of the run's steps: of 20, `steps:70%` is `steps:14`
and `fast:computed=70%` is `fast:computed=14`. What a model does not support is left out, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toma_diffusion.checks import is_number
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns import Column, ColumnSpec, columns_of
from toma_lab.columns.ours import SKIP_FIELDS
from toma_lab.folder import read_json, write_json
from toma_lab.parsing import parse_value
from toma_lab.tune.folder import TuneFolder, of_this_version

SMALL = (
    *("steps:85%", "steps:70%", "steps:60%", "steps:50%"),
    *("toma-late@0.5", "toma-stage@0.25", "toma-stage@0.5"),
    *("balanced", "fast", "faster"),
    *("fast:computed=80%", "fast:computed=70%", "fast:computed=50%"),
    "toma-late:computed=70%;ratio=0.5",
    *("first-block-cache:threshold=0.1", "taylorseer:cache_interval=3", "magcache:threshold=0.06"),
    *("deepcache:interval=2", "deepcache:interval=3"),
    *("toma-late+steps:80%@0.5", "balanced+steps:80%"),
)
"""The ratio of merging follows an @. What skips steps has that of its preset, or of its settings."""
MEDIUM = (
    *SMALL,
    *("steps:90%", "steps:80%", "steps:40%"),
    *("toma-late@0.25", "toma-late@0.75", "toma-stage@0.75", "tomesd@0.5"),
    *("fast:computed=90%", "fast:computed=35%", "fast:computed=25%", "fast:computed=20%"),
    *("toma-stage:computed=70%;ratio=0.25", "toma-stage:computed=70%;ratio=0.5", "toma-late:computed=50%;ratio=0.5"),
    *("first-block-cache:threshold=0.05", "first-block-cache:threshold=0.2"),
    *("taylorseer:cache_interval=2", "taylorseer:cache_interval=5"),
    *("magcache:threshold=0.03", "magcache:threshold=0.1"),
    *("deepcache:interval=2;branch=3", "deepcache:interval=3;branch=3", "deepcache:interval=5"),
    *("fast+steps:80%", "fast:computed=50%+steps:80%"),
)
LARGE = (
    *MEDIUM,
    *("steps:95%", "steps:75%", "steps:65%", "steps:55%", "steps:45%"),
    *("toma-once@0.5", "tofu@0.5", "todo@0.75"),
    *("fast:computed=95%", "fast:computed=75%", "fast:computed=65%", "fast:computed=55%"),
    *("fast:computed=40%+steps:80%", "toma-stage:computed=50%;ratio=0.5", "toma-late:computed=70%;ratio=0.25"),
    *("first-block-cache:threshold=0.15", "taylorseer:cache_interval=3;use_lite_mode=True"),
    *("toma-late+steps:70%@0.5", "balanced+steps:70%", "faster+steps:85%"),
    *("deepcache:interval=2+steps:80%", "first-block-cache:threshold=0.1+steps:80%"),
)
OF_CLIPS = ("taylorseer:cache_interval=3;use_lite_mode=True", "toma-stage:region_frames=1@0.5")
MORE_OF_CLIPS = (*OF_CLIPS, "toma-late:region_frames=1@0.5", "toma-stage:region_frames=1@0.25")
"""Of clips, in addition: most video models cannot have the other TaylorSeer. Tokens merge inside their frame."""
CANDIDATES = {"small": SMALL, "medium": MEDIUM, "large": LARGE}
DEFAULT_RATIO = 0.5
"""Of a method without an @."""


@dataclass(frozen=True)
class Candidates:
    """All that are tried, and those that are not."""

    columns: tuple[Column, ...]
    left_out: tuple[str, ...]
    """A sentence each."""

    def write(self, folder: TuneFolder) -> None:
        """Save them."""
        values = {"columns": [each.to_dict() for each in self.columns], "left_out": list(self.left_out)}
        write_json(folder.candidates_path, values)

    @classmethod
    def read(cls, folder: TuneFolder) -> Candidates | None:
        """Those of a folder, if it has any."""
        values = read_json(folder.candidates_path)
        if values is None:
            return None
        with of_this_version(folder.candidates_path):
            return cls(tuple(Column.from_dict(each) for each in values["columns"]), tuple(values["left_out"]))


def texts_of(budget: str, *, clips: bool) -> list[str]:
    """The candidates of a budget."""
    of_clips = OF_CLIPS if budget == "small" else MORE_OF_CLIPS
    return [*CANDIDATES[budget], *(of_clips if clips else ())]


def open_candidates(pipe_or_model: Any, texts: Iterable[str], steps: int) -> Candidates:
    """What of these is possible on a model, or on all denoisers of a pipeline, with a reason for everything else."""
    found: dict[str, Column] = {}
    done: set[str] = set()
    left_out = []
    for text in texts:
        try:
            for column in _parse(pipe_or_model, text, steps):
                does = done_by(column, steps)  # raises if it makes nothing faster
                if does not in done:
                    found.setdefault(column.column_id, column)
                done.add(does)
        except UsageError as error:
            left_out.append(f"{text}: {error}")
    if not found:
        name = type(find_denoisers(pipe_or_model)[0]).__name__
        raise UsageError(f"no candidate is possible on this {name}: {left_out[0] if left_out else ''}")
    return Candidates(tuple(found.values()), tuple(left_out))


def done_by(column: Column, steps: int, computed: tuple[int, ...] | None = None) -> str:
    """What a candidate does in a run of so many steps: two that compute the same ones are one. Raises `UsageError` if
    nothing becomes faster.

    Args:
        computed: the steps that it computed, if they are known: noise levels decide it, unless they are listed.
    """
    left = column.steps_of(steps)
    settings = column.name if column.own is None else column.own.does(left, computed)
    return f"{settings} {[each.text for each in column.shortcuts]}"


def _parse(pipe_or_model: Any, text: str, steps: int) -> Sequence[Column]:
    method, _, ratio = text.partition("@")
    exact = re.sub(r"(\d+)%", lambda match: str(max(1, round(int(match[1]) * steps / 100))), method)
    value = parse_value(ratio) if ratio else DEFAULT_RATIO
    if not is_number(value):
        raise UsageError(f"{text!r}: the ratio {ratio!r} is not a number between 0 and 1.")
    return columns_of(pipe_or_model, [ColumnSpec.parse(exact)], [value])


def moved(column: Column, steps: int, computed: tuple[int, ...] | None = None) -> list[Column]:
    """All candidates that differ from this one in one computed step, by one place; none if it skips nothing.

    Args:
        steps: of the run.
        computed: the steps that it computed, if they are known: noise levels decide it, unless they are listed.
    """
    own, left = column.own, column.steps_of(steps)
    if own is None or own.at(left).skip is None:
        return []
    overrides = (*(name for name in column.overrides if name not in SKIP_FIELDS), "computed")
    return [
        replace(column, own=own.with_computed(other), overrides=overrides)
        for other in moved_steps(computed or own.computed(left), left)
    ]


def moved_steps(computed: tuple[int, ...], steps: int) -> Iterator[tuple[int, ...]]:
    """The same for the steps alone. The first step is always computed.

    Example:

    ```python
    >>> list(moved_steps((0, 1, 3), 4))
    [(0, 2, 3), (0, 1, 2)]
    ```
    """
    for place, step in enumerate(computed[1:], start=1):
        for other in (step - 1, step + 1):
            if 0 < other < steps and other not in computed:
                yield tuple(sorted((*computed[:place], other, *computed[place + 1 :])))
