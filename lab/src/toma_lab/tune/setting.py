"""Between a chosen candidate and the file `tuned.json`."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from toma_diffusion.tuned import Tuned
from toma_lab.columns import BASELINE, Column, shortcut_from_dict
from toma_lab.columns.ours import Ours, named_after
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.outcome import Outcome


def to_file(folder: TuneFolder, outcome: Outcome) -> Tuned:
    """The file of what was chosen."""
    plan, facts = folder.plan, asdict(folder.facts)
    column = outcome.chosen.column if outcome.chosen else ORIGINAL
    measured: dict[str, Any] = {"goal": str(outcome.goal), "is_reached": outcome.is_reached}
    if outcome.chosen is not None and outcome.chosen.figures is not None:
        figures = outcome.chosen.figures
        measured |= {
            "speed_up": round(figures.speed_up, 4),
            "lpips": None if figures.lpips is None else round(figures.lpips, 5),
            "psnr": round(figures.psnr, 3) if isfinite(figures.psnr) else str(figures.psnr),
            "prompts": figures.images,
        }
        measured |= {} if figures.flicker is None else {"flicker": round(figures.flicker, 4)}
    device = facts.pop("gpu")
    measured |= {"model": plan.model, "device": device, "dtype": plan.dtype, "compile": plan.compile}
    measured |= {"versions": facts, "date": folder.date}
    shortcuts = tuple(each.to_dict() for each in column.shortcuts)
    own = {} if column.own is None else column.own.for_tuned()
    return Tuned(plan.model_class, plan.steps, **own, shortcuts=shortcuts, measured=measured, clip=folder.clip_size())


def from_file(tuned: Tuned) -> Column:
    """What `toma generate` applies."""
    shortcuts, own = tuple(shortcut_from_dict(each) for each in tuned.shortcuts), Ours.from_tuned(tuned)
    if own is not None:
        name = tuned.preset or (named_after(own.merge) if own.merge is not None else "skip")
    else:
        name = shortcuts[0].name if shortcuts else BASELINE
    return Column(name, own, shortcuts=shortcuts)
