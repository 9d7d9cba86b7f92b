"""What a generation costs on a large model, computed from measured steps, for a small model that stands for it.

A small model is too fast to show what merging saves on a large one. Its images are compared at the time that the same
settings take there: each step costs a share of a whole step, from rows of `toma bench` (step_costs.csv).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.place import ToMA
from toma_diffusion.merge.variants import VARIANTS
from toma_diffusion.others import method_of
from toma_lab.columns import Column, Shortcut
from toma_lab.columns.ours import REPLACED, named_after

FILE = Path(__file__).with_name("step_costs.csv")
"""Written by benchmarks/step_costs.py from the rows in benchmarks/results."""
MERGED, CACHED = "merged", "cached"
"""Kinds of steps."""
TIME_SETTINGS = ("unmerge", "sites", "share", "size_aware_attention", "norm_preserving")
"""Settings that change the time of a step. The regions, how destinations are chosen and how often cost far less."""
MODELS_OF_LIKE_BLOCKS = ("flux", "wan-480p")
"""Models whose blocks cost about the same each, so that half of them merged saves half. Those of a UNet do not: they
are of several grids."""
BLOCKS: Mapping[str, int] = {"sdxl": 70, "flux": 57, "wan-480p": 40}
"""Transformer blocks of the measured models."""
SMALLEST_GRID: Mapping[str, int] = {"sdxl": 1024, "flux": 4096, "wan-480p": 32760}
"""Tokens of the smallest grid that was merged there: at 1024×1024; of Wan 81 frames of 832×480."""


@dataclass(frozen=True)
class StepCost:
    """What a step of one kind costs: a merged one, or one in which a cache skips blocks."""

    model: str
    kind: str
    method: str
    """`toma`, `tomesd`, `tofu`, `todo`; or the cache."""
    preset: str = ""
    scope: str = ""
    assign: str = ""
    is_hard: bool = False
    """Whether the assignment is an index. It counts only for a global one."""
    ratio: float = 0.0
    leaves_grids: bool = False
    """Whether `min_tokens` leaves the smaller grids whole."""
    merged_blocks: float = 1.0
    """The share of the blocks that are merged."""
    extras: str = "{}"
    """Those of `TIME_SETTINGS` that differ from the defaults, as JSON."""
    within_frames: bool = False
    """Whether regions stay inside a frame of a clip (`region_frames=1`)."""
    share: float = 1.0
    """Of the time of a whole step."""
    source: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> StepCost:
        """From a row of the file."""
        read: Mapping[str, Callable[[str], Any]] = {"bool": lambda text: text == "True", "float": float, "str": str}
        return cls(**{field.name: read[str(field.type)](row[field.name]) for field in fields(cls)})


class StepCosts:
    """Those of one model."""

    def __init__(self, model: str, costs: Sequence[StepCost]) -> None:
        self.model = model
        self.costs = tuple(costs)

    @classmethod
    def load(cls, model: str, path: Path = FILE) -> StepCosts:
        """From the file of this package, or another of the same columns."""
        with path.open(newline="", encoding="utf-8") as file:
            costs = [StepCost.from_row(row) for row in csv.DictReader(file)]
        known = sorted({cost.model for cost in costs})
        if model not in known:
            raise UsageError(f"there are no measured steps of {model!r}: use one of {', '.join(known)}.")
        return cls(model, [cost for cost in costs if cost.model == model])

    def gain(self, steps: int, column: Column, *, cached: float = 0.0, blocks: int = 0) -> float | None:
        """How many times faster than all steps as they are; None if a step that it needs has not been measured.

        If the settings of a column are those of its preset, so is the row (`share_of_variant`). Otherwise rows of the
        same preset are preferred.

        Args:
            steps: of the run, with nothing saved.
            cached: the share of the steps in which the column's cache skipped blocks.
            blocks: transformer blocks of the small model, to tell which share of them `skip_blocks` leaves.
        """
        left, own = column.steps_of(steps), column.own
        computed = left if own is None else len(own.computed(left))
        inside = 0 if own is None else own.count_merged(left)
        config = None if own is None else own.at(left).merge
        merged = self._merged(column, config, blocks) if config is not None and inside else 1.0
        caches = [shortcut for shortcut in column.shortcuts if shortcut.is_cache]
        cached = cached if caches else 0.0
        if cached and (0 < inside < left or computed < left):
            return None  # nobody knows in which kind of steps the cache skips blocks
        caching = self._cached(caches[0]) if cached else 1.0
        if merged is None or caching is None:
            return None
        whole = computed - inside  # a skipped step costs nothing: the denoiser does not run
        return steps / ((1 - cached) * (inside * merged + whole) + cached * left * caching)

    def share_of_variant(self, name: str, config: Merging | None) -> float | None:
        """What a merged step of a variant of ToMA takes of a whole one, for settings that have all of it that changes
        the time of a step.

        Then the settings stand for the variant on the large model. There the last block is one of many, and no grid
        may be too small, so neither the blocks nor the grids of the small model count. None if the settings are other
        ones, or if that step has not been measured.
        """
        if config is None or name not in VARIANTS or self.model not in BLOCKS:
            return None
        own = replace(VARIANTS[name], ratio=config.ratio)
        known = identity(own)
        if identity(config) != known or config.to_dict()["min_tokens"] != own.min_tokens:
            return None
        if whole_blocks(config) != whole_blocks(own):
            return None
        wanted = known | {"leaves_grids": own.min_tokens > SMALLEST_GRID[self.model]}
        return self._share(self._rows(name, wanted), 1 - len(whole_blocks(own)) / BLOCKS[self.model])

    def _merged(self, column: Column, config: Merging, blocks: int) -> float | None:
        """The share of a whole step that a merged one takes."""
        has_preset = column.own is not None and column.own.preset is not None
        share = self.share_of_variant(named_after(config) if has_preset else column.name, config)
        if share is not None:
            return share
        own = 1 - len(whole_blocks(config)) / blocks if blocks else 1.0
        return self._share(self._rows(column.name, identity(config)), own)

    def _share(self, costs: Sequence[StepCost], merged_blocks: float) -> float | None:
        """The share of those with that part of the blocks merged; where blocks are alike, as if it were that part."""
        exact = [cost.share for cost in costs if abs(cost.merged_blocks - merged_blocks) < 0.005]
        if exact:
            return median(exact)
        if costs and self.model in MODELS_OF_LIKE_BLOCKS:
            return 1 - merged_blocks * median((1 - cost.share) / cost.merged_blocks for cost in costs)
        return None

    def _rows(self, preset: str, wanted: Mapping[str, Any]) -> list[StepCost]:
        """Those of these settings; if there are any of the preset, those alone."""
        found = [cost for cost in self.costs if cost.kind == MERGED and _matches(cost, wanted)]
        return [cost for cost in found if cost.preset == preset] or found

    def _cached(self, cache: Shortcut) -> float | None:
        """The share of a whole step that one takes in which the cache skips blocks, or a little more."""
        found = [cost.share for cost in self.costs if cost.kind == CACHED and cost.method == cache.skipped_step]
        if not found or not cache.more_blocks:
            return median(found) if found else None
        least = median(found)
        return least + (1 - least) * cache.more_blocks / BLOCKS[self.model]


def whole_blocks(config: Merging) -> tuple[int, ...]:
    """The blocks that are left whole; by default, where a model family has none of its own, the last one of stages."""
    if config.skip_blocks is not None:
        return config.skip_blocks
    return (-1,) if config.skips_last_block else ()


def identity(config: Merging) -> dict[str, Any]:
    """The fields of a `StepCost` that settings decide, but for the blocks."""
    values, is_toma = config.to_dict(), isinstance(config, Merge)
    defaults = Merge().to_dict() | dict(REPLACED) if is_toma else type(config)().to_dict()
    values |= {"share": "plan"} if values.get("share_plan") else {}
    extras = {name: values[name] for name in TIME_SETTINGS if name in values and values[name] != defaults.get(name)}
    return {
        "method": ToMA.name if is_toma else method_of(config).name,
        "scope": config.scope,
        "assign": config.assign,
        "is_hard": config.assign == "global" and values.get("scale") == "inf",
        "ratio": config.ratio,
        "leaves_grids": bool(values.get("min_tokens")),
        "extras": json.dumps(extras, sort_keys=True),
        "within_frames": values.get("region_frames") == 1,
    }


def _matches(cost: StepCost, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(cost, name) == value for name, value in wanted.items())
