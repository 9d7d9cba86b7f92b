"""What a generation costs on a large model, computed from measured steps, for a small model that stands for it.

A small model is too fast to show what merging saves on a large one. Its images are compared at the time that the same
settings take there: each step costs a share of a whole step, from rows of `toma bench` (step_costs.csv).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from toma_diffusion.config import PRESETS, Config
from toma_diffusion.config.reuse import PARTS
from toma_diffusion.core.schedule import Schedule
from toma_diffusion.errors import UsageError
from toma_diffusion.experiments.shortcuts import Shortcut
from toma_diffusion.methods import method_of

FILE = Path(__file__).with_name("step_costs.csv")
"""Written by benchmarks/step_costs.py from the rows in benchmarks/results."""
MERGED, SKIPPED, REUSED = "merged", "skipped", "reused"
"""Kinds of steps."""
MULTIPLICATIONS = "multiplications"
"""The source of a cost that was counted, not timed."""
TIME_SETTINGS = ("unmerge", "sites", "share", "size_aware_attention", "norm_preserving")
"""Settings that change the time of a step. The regions, how destinations are chosen and how often cost far less."""
MODELS_OF_LIKE_BLOCKS = ("flux", "wan-480p")
"""Models whose blocks cost about the same each, so that half of them merged saves half. Those of a UNet do not: they
are of several grids."""
BLOCKS: Mapping[str, int] = {"sdxl": 70, "flux": 57, "wan-480p": 40}
"""Transformer blocks of the measured models."""
SMALLEST_GRID: Mapping[str, int] = {"sdxl": 1024, "flux": 4096, "wan-480p": 32760}
"""Tokens of the smallest grid that was merged there: at 1024×1024; of Wan 81 frames of 832×480."""
LEFT_WHOLE = ("skip_blocks", "min_tokens")
"""Settings that leave another part of a small model whole than of a large one."""
COUNTED_APART = ("ratio", "window", "max_steps", "reuse")
"""Settings that a variant of a preset may change: every ratio has rows of its own, steps outside the window cost what a
whole step costs, and steps that reuse have rows of their own."""


@dataclass(frozen=True)
class StepCost:
    """What a step of one kind costs: a merged one, one that a cache skips, or one that reuses."""

    model: str
    kind: str
    method: str
    """`toma`, `tomesd`, `tofu`, `todo`; of a skipped step the cache; of one that reuses the part that it reuses."""
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
        return cls(
            **{
                name: row[name] for name in ("model", "kind", "method", "preset", "scope", "assign", "extras", "source")
            },
            is_hard=row["is_hard"] == "True",
            ratio=float(row["ratio"]),
            leaves_grids=row["leaves_grids"] == "True",
            merged_blocks=float(row["merged_blocks"]),
            within_frames=row["within_frames"] == "True",
            share=float(row["share"]),
        )


@dataclass(frozen=True)
class PresetStep:
    """A merged step of a preset, as it was measured on the large model."""

    preset: str
    share: float
    """Of the time of a whole step."""
    not_counted: Mapping[str, Any]
    """Settings that differ from those of the preset, and that no row tells apart: regions, selection, schedule."""

    @property
    def note(self) -> str:
        """A sentence about them; empty if there are none."""
        if not self.not_counted:
            return ""
        settings = ", ".join(f"{name}={value}" for name, value in self.not_counted.items())
        return f"a merged step is taken to cost what one of {self.preset} costs; not counted: {settings}"


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

    def gain(
        self,
        steps: int,
        *,
        preset: str = "",
        config: Config | None = None,
        shortcuts: Sequence[Shortcut] = (),
        skipped: float = 0.0,
        blocks: int = 0,
    ) -> float | None:
        """How many times faster than all steps as they are; None if a step that it needs has not been measured.

        Args:
            steps: of the run, with nothing saved.
            preset: its name. If the settings are its own, so is the row (`step_of_preset`). Otherwise rows of the same
                preset are preferred.
            config: of merging.
            shortcuts: fewer steps, or a cache.
            skipped: the share of the steps that the cache skipped.
            blocks: transformer blocks of the small model, to tell which share of them `skip_blocks` leaves.
        """
        left = steps
        for shortcut in shortcuts:
            left = shortcut.steps_of(left)
        schedule = None if config is None else Schedule.from_config(config)
        inside = sum(schedule.action(step, left) is not None for step in range(left)) if schedule else 0
        inside = inside if config is not None and config.ratio else 0
        merged = self._merged(preset, config, blocks) if config is not None and inside else 1.0
        reused = sum(schedule.reuses(step, left) for step in range(left)) if schedule and left > 0 else 0
        if schedule is not None and schedule.corrects(left):
            reused = 0  # these steps are merged ones
        reusing = self._reused(config) if config is not None and reused else 1.0
        caches = [shortcut for shortcut in shortcuts if shortcut.is_cache]
        skipped = skipped if caches else 0.0  # what reuses skips blocks too, and is counted above
        if caches and skipped and (0 < inside < left or reused):
            return None  # nobody knows whether the skipped steps are merged or reused ones
        skipping = self._skipped(caches[0]) if caches and skipped else 1.0
        if merged is None or skipping is None or reusing is None:
            return None
        computed = (inside * merged + reused * reusing + (left - inside - reused)) / left
        return steps / (left * ((1 - skipped) * computed + skipped * skipping))

    def step_of_preset(self, preset: str, config: Config | None) -> PresetStep | None:
        """The measured step of a preset, for a configuration that has all its settings that change the time of a step.

        Then the configuration stands for the preset on the large model. There the last block is one of many, and no
        grid may be too small, so neither the blocks nor the grids of the small model count. None if the configuration
        is another one, or if that step has not been measured.
        """
        if config is None or preset not in PRESETS or self.model not in BLOCKS:
            return None
        own = replace(PRESETS[preset], ratio=config.ratio)
        values, plain = config.to_dict(), own.to_dict()
        if identity(config) != identity(own) or any(values[name] != plain[name] for name in LEFT_WHOLE):
            return None
        wanted = identity(own) | {"leaves_grids": own.min_tokens > SMALLEST_GRID[self.model]}
        share = self._share(self._rows(preset, wanted), 1 - len(own.skip_blocks) / BLOCKS[self.model])
        if share is None:
            return None
        differing = {name: value for name, value in values.items() if value != plain[name]}
        not_counted = {name: value for name, value in differing.items() if name not in COUNTED_APART}
        return PresetStep(preset, share, not_counted)

    def _merged(self, preset: str, config: Config, blocks: int) -> float | None:
        """The share of a whole step that a merged one takes."""
        of_preset = self.step_of_preset(preset, config)
        if of_preset is not None:
            return of_preset.share
        own = 1 - len(config.skip_blocks) / blocks if blocks else 1.0
        return self._share(self._rows(preset, identity(config)), own)

    def _share(self, costs: Sequence[StepCost], merged_blocks: float) -> float | None:
        """The share of those with that part of the blocks merged; where blocks are alike, as if it were that part."""
        exact = [cost.share for cost in costs if abs(cost.merged_blocks - merged_blocks) < 0.005]
        if exact:
            return median(exact)
        if costs and self.model in MODELS_OF_LIKE_BLOCKS:
            return 1 - merged_blocks * median((1 - cost.share) / cost.merged_blocks for cost in costs)
        return None

    def _reused(self, config: Config) -> float | None:
        """The share of a whole step that one takes that reuses. Where blocks are all there is, both parts are one."""
        part = config.reuse.part if config.reuse is not None else ""
        for wanted in (part, *(PARTS if self.model in MODELS_OF_LIKE_BLOCKS else ())):
            found = [cost.share for cost in self.costs if cost.kind == REUSED and cost.method == wanted]
            if found:
                return median(found)
        return None

    def _rows(self, preset: str, wanted: Mapping[str, Any]) -> list[StepCost]:
        """Those of these settings; if there are any of the preset, those alone."""
        found = [cost for cost in self.costs if cost.kind == MERGED and _matches(cost, wanted)]
        return [cost for cost in found if cost.preset == preset] or found

    def is_counted(self, config: Config | None) -> bool:
        """Whether steps of this configuration that reuse were not timed: their multiplications were counted."""
        part = config.reuse.part if config is not None and config.reuse is not None else ""
        return any(cost.source == MULTIPLICATIONS for cost in self.costs if cost.kind == REUSED and cost.method == part)

    def _skipped(self, cache: Shortcut) -> float | None:
        """The share of a whole step that a skipped one takes, or a little more."""
        found = [cost.share for cost in self.costs if cost.kind == SKIPPED and cost.method == cache.skipped_step]
        return median(found) if found else None


def identity(config: Config) -> dict[str, Any]:
    """The fields of a `StepCost` that a configuration decides, but for the blocks."""
    values, defaults = config.to_dict(), type(config)().to_dict()
    extras = {name: values[name] for name in TIME_SETTINGS if name in values and values[name] != defaults[name]}
    return {
        "method": method_of(config).name,
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
