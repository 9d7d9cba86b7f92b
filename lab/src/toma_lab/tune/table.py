"""The table of a search: one row per candidate, with every setting, the machine and the versions."""

from __future__ import annotations

import csv
from dataclasses import asdict

from toma_diffusion.files import replacing
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.outcome import Outcome, Result
from toma_lab.tune.setting import clip_size

KEY = ("method", "settings", "scope", "assign", "ratio")
COLUMNS = (
    *("model", "setting", *KEY, "state", "images", "speed_up", "lpips", "psnr", "flicker"),
    *("goal", "steps", "guidance", "frames", "resolution", "dtype", "compile", "budget", "lpips_weights"),
    *("device", "torch", "diffusers", "toma_diffusion", "commit", "date"),
)


def state_of(result: Result, outcome: Outcome) -> str:
    """What became of a candidate."""
    if result.failure:
        return f"failed: {result.failure}"
    if result == outcome.chosen:
        return "chosen"
    return "finalist" if result.is_finalist else "dropped in the search"


def write_table(folder: TuneFolder, outcome: Outcome) -> None:
    """Replace table.csv."""
    with replacing(folder.path / "table.csv") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_row(folder, outcome, result) for result in outcome.results)


def _row(folder: TuneFolder, outcome: Outcome, result: Result) -> dict[str, str]:
    plan, facts, figures, clip = folder.plan, asdict(folder.facts), result.figures, clip_size(folder)
    row = {
        "model": plan.model,
        "setting": result.variant.title,
        **result.variant.key,
        "state": state_of(result, outcome),
        "goal": str(outcome.goal),
        "steps": str(plan.steps),
        "guidance": "" if plan.guidance is None else f"{plan.guidance:g}",
        "frames": str(clip.frames) if clip else "",
        "resolution": f"{clip.width}x{clip.height}" if clip else "",
        "dtype": plan.dtype,
        "compile": plan.compile,
        "budget": plan.budget,
        "lpips_weights": plan.lpips,
        "device": facts["gpu"],
        **{name: facts[name] for name in ("torch", "diffusers", "toma_diffusion", "commit")},
        "date": folder.date,
    }
    if figures is not None:
        lpips = "" if figures.lpips is None else f"{figures.lpips:.6g}"
        row |= {"images": str(figures.images), "speed_up": f"{figures.speed_up:.4f}"}
        flicker = "" if figures.flicker is None else f"{figures.flicker:.6g}"
        row |= {"lpips": lpips, "psnr": f"{figures.psnr:.6g}", "flicker": flicker}
    return row
