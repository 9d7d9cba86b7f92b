"""The table of a run, made from its folder: one row per variant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from toma_lab.evaluation.folder import RunFolder, Scores
from toma_lab.evaluation.plan import NOISE_FLOOR, Plan, Variant
from toma_lab.experiments.costs import StepCosts
from toma_lab.metrics import CLIP_METRICS, IMAGE_METRICS, JOINT_METRICS, METRICS
from toma_lab.metrics.pixels import pool_psnr
from toma_lab.pipelines.clips import read_clip

if TYPE_CHECKING:
    from rich.table import Table

SECONDS, SKIPPED = "seconds", "skipped"
MEASURED = "measured"
COLUMNS = (
    *("model", "method", "ratio", "scope", "assign", "settings", "images"),
    *(SECONDS, "speedup", SKIPPED, "gain", "gain_source", *METRICS, "sources"),
    *("steps", "guidance", "resolution", "frames", "dtype"),
    *("device", "torch", "diffusers", "toma_diffusion", "commit", "date"),
)

AVERAGES: Mapping[str, Callable[[Sequence[float]], float]] = {SECONDS: median, "psnr": pool_psnr}
"""How values are combined that are not averaged by the mean."""


def rows_of(folder: RunFolder) -> list[dict[str, str]]:
    """One row per variant. A value that some of its images lack is left empty: it would not be comparable."""
    plan, facts = folder.plan, folder.facts
    common = {
        "model": plan.model,
        "images": str(len(plan.items)),
        "steps": str(plan.steps),
        "guidance": "" if plan.guidance is None else f"{plan.guidance:g}",
        **_size(folder),
        "dtype": plan.dtype,
        "device": facts.gpu,
        "torch": facts.torch,
        "diffusers": facts.diffusers,
        "toma_diffusion": facts.toma_diffusion,
        "commit": facts.commit,
        "date": folder.date,
    }
    costs = StepCosts.load(plan.time_of) if plan.time_of else None
    rows = []
    for variant in plan.variants:
        found = _figures(folder, variant)
        row = dict.fromkeys(COLUMNS, "") | common | variant.key
        row |= {
            name: f"{value:.6g}" for name, value in found.values.items() if name in (SECONDS, SKIPPED, *plan.metrics)
        }
        speedup = _speedup(folder, variant)
        row["speedup"] = "" if speedup is None else f"{speedup:.4f}"
        gain = speedup if costs is None else gain_of(costs, variant, plan, found.values.get(SKIPPED, 0.0))
        if gain is not None:
            row |= {"gain": f"{gain:.4f}", "gain_source": plan.time_of or MEASURED}
        sources = {name: source for name, source in sorted(found.sources.items()) if source and row[name]}
        row["sources"] = json.dumps(sources, separators=(",", ":"))
        rows.append(row)
    return rows


def gain_of(costs: StepCosts, variant: Variant, plan: Plan, cached: float) -> float | None:
    """How many times faster a variant would be on the large model, if its steps have been measured there."""
    if variant.name == NOISE_FLOOR:
        return None
    return costs.gain(
        plan.steps,
        preset=variant.name,
        config=variant.config,
        shortcuts=variant.shortcuts,
        cached=cached,
        blocks=plan.blocks,
    )


def notes_of(folder: RunFolder) -> list[str]:
    """A sentence for every computed gain that does not count some of the settings."""
    plan = folder.plan
    if not plan.time_of:
        return []
    costs = StepCosts.load(plan.time_of)
    notes = []
    for variant, row in zip(plan.variants, folder.table(), strict=True):
        step = costs.step_of_preset(variant.name, variant.config)
        if row["gain"] and step is not None and step.note:
            notes.append(f"Gain of {variant.title!r}: {step.note}.")
    return notes


def _figures(folder: RunFolder, variant: Variant) -> Scores:
    """The averages over the images of a variant, and its joint metrics."""
    joint = folder.joint_scores(variant)
    values = {name: value for name, value in joint.values.items() if name in JOINT_METRICS}
    sources = dict(joint.sources)
    of_items = [folder.item_scores(variant, item) for item in folder.plan.items]
    for name in (SECONDS, SKIPPED, *IMAGE_METRICS, *CLIP_METRICS):
        if all(name in scores.values for scores in of_items):
            origins = {scores.sources.get(name, "") for scores in of_items}
            if len(origins) == 1:
                values[name] = AVERAGES.get(name, fmean)([scores.values[name] for scores in of_items])
                sources[name] = origins.pop()
    return Scores(values, sources)


def _speedup(folder: RunFolder, variant: Variant) -> float | None:
    """The median over the images of baseline seconds / variant seconds.

    The two times of an image were measured one shortly after the other, so that a busy machine changes their ratio
    less than it changes the median times.
    """
    ratios = []
    for item in folder.plan.items:
        own = folder.item_scores(variant, item).values.get(SECONDS)
        baseline = folder.item_scores(folder.plan.baseline, item).values.get(SECONDS)
        if not own or not baseline:
            return None
        ratios.append(baseline / own)
    return median(ratios)


def _size(folder: RunFolder) -> dict[str, str]:
    """Width × height, and the frames of a clip."""
    from PIL import Image

    path = folder.image_path(folder.plan.baseline, folder.plan.items[0])
    with Image.open(path) as image:
        frames = str(len(read_clip(path).frames)) if folder.plan.clips else ""
        return {"resolution": f"{image.width}x{image.height}", "frames": frames}


HEADINGS: Mapping[str, str] = {
    SECONDS: "s",
    "speedup": "speed-up",
    "gain": "gain",
    "mse": "MSE ↓",
    "psnr": "PSNR ↑",
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
    "dino": "DINO ↓",
    "clip_t": "CLIP-T ↑",
    "flicker": "Flicker ↓",
    "fid": "FID ↓",
    "kid": "KID ↓",
}
FORMATS: Mapping[str, str] = {
    SECONDS: ".3g",
    "speedup": ".2f",
    "gain": ".2f",
    "mse": ".1f",
    "psnr": ".2f",
    "ssim": ".3f",
    "lpips": ".3f",
    "dino": ".3f",
    "clip_t": ".2f",
    "flicker": ".2f",
    "fid": ".2f",
    "kid": ".4f",
}


def to_rich(folder: RunFolder) -> Table:
    """The table for a terminal. Columns that are empty in all rows are left out."""
    from rich import box
    from rich.table import Table

    rows = folder.table()
    plan = folder.plan
    shown = [name for name in HEADINGS if any(row.get(name) for row in rows) and (name != "gain" or plan.time_of)]
    what = f"{rows[0]['images']} {'clips' if plan.clips else 'images'} of {rows[0]['resolution']}"
    frames = f", {rows[0]['frames']} frames" if plan.clips else ""
    title = f"{plan.model}, {what}{frames}, {plan.steps} steps, {folder.facts.gpu}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for name in shown:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    for variant, row in zip(plan.variants, rows, strict=True):
        table.add_row(variant.title, *(format(float(row[name]), FORMATS[name]) if row[name] else "" for name in shown))
    return table
