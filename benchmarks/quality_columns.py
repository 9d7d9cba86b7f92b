"""What quality.py compares: methods and settings as text, by the part of the table that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toma_lab.columns import SHORTCUTS, Column, ColumnSpec, columns_of
from toma_lab.columns.base import written
from toma_lab.columns.ours import OurSpec

from toma_diffusion.errors import UsageError

RATIOS, HALF = (0.25, 0.5, 0.75), (0.5,)
EVERY_STEP = "select_every=1;reweigh_every=1"
STAGE = "toma-stage:select_every=1"
"""What the sweeps change: `toma-stage` as it is, everything chosen in every step."""
BEFORE = (
    "toma-stage:num_regions=64;distance_weight=0;guidance_parts=1;share_plan=True;skip_blocks=();select_every=10"
    ";reweigh_every=5"
)
"""`toma-stage` as it was before its regions were sized in tokens, both halves of guidance chose together, every run of
blocks had its own plan, and the last block was left whole."""
GAINS = (1.15, 1.25, 1.43, 1.67, 2.0, 2.5)
"""How many times fewer steps are tried."""
SKIPPING = ("balanced", "fast", "faster")
"""The presets that skip steps."""
COMPUTED_STEPS = "computed steps"
"""Where the gain of what saves whole steps comes from."""
BOX, WITHIN_FRAMES, LONG_BOX = (4, 256), (1, 256), (16, 256)
"""Frames and tokens of a region of a clip: as by default, inside a frame, and over all frames of the small model."""


@dataclass(frozen=True)
class Conditions:
    """What the list of methods depends on."""

    steps: int
    has_guidance: bool
    is_sweep: bool = True
    """Whether all settings are tried at this number of steps. Otherwise only what a user would choose between."""
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
    at_all_steps: bool = False


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


def regions(at: Conditions) -> list[str]:
    """How many tokens a region has, how destinations are chosen in it, and how often."""
    return [
        f"toma-stage:region_tokens={tokens};selection_tokens={tokens};selection={selection};select_every={every}"
        f";reweigh_every={min(every, 5)}"
        for tokens in (16, 64, 256)
        for selection in ("facility-location", "random")
        for every in (1, 10)
    ]


def distances(at: Conditions) -> list[str]:
    """How much near tokens are preferred."""
    return [
        f"{STAGE};region_tokens={tokens};distance_weight={weight}"
        for tokens in (64, 256, 1024)
        for weight in (0, 0.1, 0.3, 1, 3)
    ]


def guidance(at: Conditions) -> list[str]:
    """A plan of its own for either half of guidance, or one for both."""
    if not at.has_guidance:
        return []
    return [f"{STAGE};region_tokens={tokens};guidance_parts={parts}" for tokens in (16, 256) for parts in (1, "auto")]


def where_and_when(at: Conditions) -> list[str]:
    """Steps, grids and blocks that are left whole."""
    step = 1 / at.steps
    windows = [(0.0, 1.0), (step, 1.0), (0.0, 1 - step), (step, 1 - step), (0.25, 1.0), (0.5, 1.0)]
    blocks = ["()", "(0,)", "(0,-1)", "(-2,-1)", "(0,1,-2,-1)"]
    return [
        *(f"{STAGE};window=({start:g},{end:g})" for start, end in dict.fromkeys(windows)),
        f"{STAGE};min_tokens=512",
        f"{STAGE};min_tokens=512;window=(0.0,{1 - step:g})",
        *(f"{STAGE};skip_blocks={each}" for each in blocks),
    ]


def sharing(at: Conditions) -> list[str]:
    """What runs of blocks share, and in which parts of a region destinations are selected."""
    return [
        f"{preset};region_tokens={tokens};selection_tokens={part};share_plan={shared}"
        for preset in (STAGE, f"toma-stage:scope=block;{EVERY_STEP}")
        for tokens, part in ((16, 16), (64, 64), (256, 64), (256, 256), (1024, 64))
        for shared in (True, False)
    ]


def region(frames: int, tokens: int, *changes: str) -> str:
    """`toma-stage` in regions of so many frames and tokens."""
    return ";".join([f"toma-stage:region_frames={frames}", f"region_tokens={tokens}", *changes])


def clip_caches(at: Conditions) -> list[str]:
    """Those that diffusers has for video transformers. Clips with the first-block cache are made one by one.

    TaylorSeer only in its lite mode: in the other one diffusers 0.42 finds no attention in Wan, and changes nothing.
    """
    lite = "use_lite_mode=True"
    essential = ["first-block-cache:threshold=0.2", f"taylorseer:cache_interval=2;{lite}", "magcache:threshold=0.06"]
    return essential + at.is_sweep * [
        *(f"first-block-cache:threshold={threshold}" for threshold in (0.1, 0.4)),
        *(f"taylorseer:cache_interval={interval};{lite}" for interval in (3, 5) if interval < at.steps),
        "magcache:threshold=0.12",
        *(f"seacache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *of_cache_dit(at),
    ]


def boxes(at: Conditions) -> list[str]:
    """Regions of all shapes. A frame of the small model has 256 tokens, so that no more fit inside one."""
    shapes = [(frames, tokens) for frames in (1, 2, 4, 8, 16) for tokens in (64, 256, 1024)]
    return [region(frames, tokens) for frames, tokens in shapes if tokens <= 256 * frames]


def nearness(at: Conditions) -> list[str]:
    """How much near tokens are preferred."""
    boxes = (WITHIN_FRAMES, BOX)
    return [region(*box, f"distance_weight={weight}") for box in boxes for weight in (0, 0.1, 0.3, 1)]


def whole_blocks(at: Conditions) -> list[str]:
    """Blocks that are left whole."""
    return [f"toma-stage:skip_blocks={blocks}" for blocks in ("()", "(0,)", "(-1,)", "(0,-1)")]


AT_EQUAL_COST: Mapping[str, Part] = {
    "skip": Part(skip, at_all_steps=True),
    "lists": Part(lists, at_all_steps=True),
    "solvers": Part(solvers, at_all_steps=True),
    "steps": Part(lambda at: [f"steps:{count}" for count in at.counts], at_all_steps=True),
    "fewer steps": Part(lambda at: [f"steps:{number}" for number in fewer(at.steps)], at_all_steps=True),
}
"""What saves whole steps. The last with more numbers of steps, to compare merging with."""
PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "caches": Part(caches, at_all_steps=True),
    "presets": Part(
        lambda at: [
            *("toma-late", "toma-stage", BEFORE, "toma", "toma:scale=1000", "toma-stripe", "toma-tile", "toma-once"),
            *("tomesd", "tofu", "todo"),
        ],
        RATIOS,
        at_all_steps=True,
    ),
    "combined": Part(combined, (0.25, 0.5)),
    "regions": Part(regions),
    "distances": Part(distances),
    "guidance": Part(guidance, RATIOS),
    "where and when": Part(where_and_when),
    "sharing": Part(sharing),
}
CLIP_PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "presets": Part(
        lambda at: ["toma-stage", "toma-late", *at.is_sweep * ["toma-tile", "toma"]], RATIOS, at_all_steps=True
    ),
    "frames": Part(lambda at: [region(*box) for box in (WITHIN_FRAMES, BOX, LONG_BOX)], RATIOS, at_all_steps=True),
    "caches": Part(clip_caches, at_all_steps=True),
    "boxes": Part(boxes),
    "nearness": Part(nearness),
    "whole blocks": Part(whole_blocks),
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
