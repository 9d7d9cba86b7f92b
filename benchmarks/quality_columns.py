"""What quality.py compares: methods and settings as text, by the part of the table that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from table_rows import SKIPPING
from toma_lab.columns import SHORTCUTS, Column, ColumnSpec, columns_of
from toma_lab.columns.base import written
from toma_lab.columns.ours import OurSpec

from toma_diffusion.errors import UsageError

RATIOS, HALF = (0.25, 0.5, 0.75), (0.5,)
STAGE = "toma-stage:select_every=1"
"""`toma-stage` as it is, everything chosen in every step."""
GAINS = (1.15, 1.25, 1.43, 1.67, 2.0, 2.5)
"""How many times fewer steps are tried."""
BOX, WITHIN_FRAMES, LONG_BOX = (4, 256), (1, 256), (16, 256)
"""Frames and tokens of a region of a clip: as by default, inside a frame, and over all frames of the small model."""


@dataclass(frozen=True)
class Conditions:
    """What the list of methods depends on."""

    steps: int
    computed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Which steps each preset computes."""
    learned: tuple[str, ...] = ()
    """Files of what was learned on the model."""

    @property
    def counts(self) -> list[int]:
        """How many steps the presets compute."""
        return sorted({len(steps) for steps in self.computed.values()} - {self.steps}, reverse=True)


@dataclass(frozen=True)
class Part:
    """Methods that are measured together."""

    methods: Callable[[Conditions], list[str]]
    ratios: tuple[float, ...] = HALF


def fewer(steps: int) -> list[int]:
    """Numbers of steps that save 1.15 to 2.5 times, as near as whole numbers come."""
    return sorted({round(steps / gain) for gain in GAINS} - {0, steps}, reverse=True)


def skip(at: Conditions) -> list[str]:
    """The presets that skip steps, as they are and with what was learned on the model."""
    return [*SKIPPING, *(f"{preset}:learned={file}" for file in at.learned for preset in SKIPPING)]


def lists(at: Conditions) -> list[str]:
    """The plain solver on the steps that the presets compute."""
    return [f"timesteps:computed={written(steps)}" for steps in at.computed.values() if len(steps) < at.steps]


def solvers(at: Conditions) -> list[str]:
    """Better solvers with as many steps as the presets compute: as usually spaced, on the published lists, and DPM++ on
    the presets' own steps."""
    return [
        *(f"solver:name={name};steps={count}" for name in ("dpmpp-2m", "unipc") for count in at.counts),
        *(f"solver:name=dpmpp-2m;steps={count};spacing=ays" for count in at.counts),
        *(f"solver:name=dpmpp-2m;computed={written(steps)}" for steps in at.computed.values() if len(steps) < at.steps),
    ]


def of_cache_dit(at: Conditions) -> list[str]:
    """DBCache with one block computed, alone and with each calibrator; and the step masks. The package's own number of
    warm-up steps is for 50."""
    cache = f"cache-dit:F=1;B=0;max_warmup_steps={max(1, min(8, at.steps // 5))}"
    taylor = "calibrator=taylorseer;taylorseer_order=1"
    masks = ("medium", "fast", "ultra")
    return [
        *(f"{cache};R={threshold}" for threshold in (0.1, 0.2, 0.35, 0.6)),
        *(f"{cache};R={threshold};{taylor};max_continuous_cached_steps=3" for threshold in (0.2, 0.35)),
        *(f"{cache};R=0.35;calibrator={name}" for name in ("foca", "dmd")),
        *(f"cache-dit:F=1;B=0;steps_mask={mask};steps_computation_policy=static" for mask in masks),
        *(f"cache-dit:F=1;B=0;steps_mask={mask};steps_computation_policy=static;{taylor}" for mask in masks),
    ]


def caches(at: Conditions) -> list[str]:
    """Those of UNets and those of transformers; a model has one kind."""
    lite = "use_lite_mode=True"
    return [
        *(f"deepcache:interval={interval}" for interval in (2, 3, 5)),
        *(f"deepcache:interval={interval};branch=3" for interval in (2, 3)),
        *(f"first-block-cache:threshold={threshold}" for threshold in (0.05, 0.1, 0.2, 0.4)),
        *(f"taylorseer:cache_interval={interval};{lite}" for interval in (2, 3, 5) if interval < at.steps),
        *(f"taylorseer:cache_interval={interval}" for interval in (2, 3) if interval < at.steps),
        *(f"magcache:threshold={threshold}" for threshold in (0.03, 0.06, 0.12, 0.24)),
        *(f"seacache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *of_cache_dit(at),
    ]


def combined(at: Conditions) -> list[str]:
    """Merging together with what else saves time."""
    others = (f"steps:{round(at.steps / 1.25)}", "deepcache:interval=2", "first-block-cache:threshold=0.1")
    return [f"{preset}+{other}" for preset in ("toma-late", STAGE) for other in others]


def region(frames: int, tokens: int) -> str:
    """`toma-stage` in regions of so many frames and tokens."""
    return f"toma-stage:region_frames={frames};region_tokens={tokens}"


def clip_caches(at: Conditions) -> list[str]:
    """Those that diffusers has for video transformers. Clips with the first-block cache are made one by one.

    TaylorSeer only in its lite mode: in the other one diffusers 0.42 finds no attention in Wan, and changes nothing.
    """
    lite = "use_lite_mode=True"
    return [
        *(f"first-block-cache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *(f"taylorseer:cache_interval={interval};{lite}" for interval in (2, 3, 5) if interval < at.steps),
        *(f"magcache:threshold={threshold}" for threshold in (0.06, 0.12)),
        *(f"seacache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *of_cache_dit(at),
    ]


AT_EQUAL_COST: Mapping[str, Part] = {
    "skip": Part(skip),
    "lists": Part(lists),
    "solvers": Part(solvers),
    "steps": Part(lambda at: [f"steps:{count}" for count in at.counts]),
    "fewer steps": Part(lambda at: [f"steps:{number}" for number in fewer(at.steps)]),
}
"""What saves whole steps. The last with more numbers of steps, to compare merging with."""
METHODS = (
    *("toma-late", "toma-stage", "toma", "toma:scale=1000", "toma-stripe", "toma-tile", "toma-once"),
    *("tomesd", "tofu", "todo"),
)
PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "caches": Part(caches),
    "presets": Part(lambda at: [*METHODS], RATIOS),
    "combined": Part(combined, (0.25, 0.5)),
}
"""The parts that were swept to choose the defaults have their rows and tables, and are not measured again."""
CLIP_PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "presets": Part(lambda at: ["toma-stage", "toma-late", "toma-tile", "toma"], RATIOS),
    "frames": Part(lambda at: [region(*box) for box in (WITHIN_FRAMES, BOX, LONG_BOX)], RATIOS),
    "caches": Part(clip_caches),
}
"""Of a model of clips."""


def methods_of(part: Part, at: Conditions, changes: str) -> list[str]:
    """The methods of a part, with the changes that the model needs."""
    given = changes.partition("=")[0]
    methods = []
    for text in part.methods(at):
        merging, plus, shortcut = text.partition("+")
        name = merging.partition(":")[0]
        if changes and name not in SHORTCUTS and given not in merging and OurSpec.parse(merging).knows(given):
            merging += (";" if ":" in merging else ":") + changes
        methods.append(merging + plus + shortcut)
    return list(dict.fromkeys(methods))


def columns_at(part: Part, pipe: Any, at: Conditions, changes: str) -> tuple[list[Column], list[str]]:
    """The columns of a part, and a reason for each that is not possible on this pipeline."""
    columns: dict[Column, None] = {}
    left_out = []
    for text in methods_of(part, at, changes):
        try:
            for column in columns_of(pipe, [ColumnSpec.parse(text)], part.ratios):
                columns[checked(column, at.steps)] = None
        except UsageError as error:
            left_out.append(f"{text}: {error}")
    return list(columns), left_out


def checked(column: Column, steps: int) -> Column:
    """A column with what was learned for its own number of computed steps alone, if it is possible with so many."""
    column.steps_of(steps)
    if column.own is None:
        return column
    column.own.check_learned(steps)
    return replace(column, own=column.own.as_used())
