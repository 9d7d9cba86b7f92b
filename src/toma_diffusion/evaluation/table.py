"""The table of a run: one row a variant, made from the folder alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from toma_diffusion.evaluation.folder import RunFolder, Scores
from toma_diffusion.evaluation.plan import Variant
from toma_diffusion.metrics import IMAGE_METRICS, JOINT_METRICS, METRICS
from toma_diffusion.metrics.pixels import pool_psnr

if TYPE_CHECKING:
    from rich.table import Table

SECONDS = "seconds"
COLUMNS = (
    *("model", "method", "ratio", "scope", "assign", "settings", "images"),
    *(SECONDS, "speedup", *METRICS, "sources"),
    *("steps", "guidance", "resolution", "dtype"),
    *("device", "torch", "diffusers", "toma_diffusion", "commit", "date"),
)

AVERAGES: Mapping[str, Callable[[Sequence[float]], float]] = {SECONDS: median, "psnr": pool_psnr}
"""Of what is not averaged by the mean."""


def rows_of(folder: RunFolder) -> list[dict[str, str]]:
    """One for each variant. A figure that not all its images have is left empty: it would be of other images."""
    plan, facts = folder.plan, folder.facts
    common = {
        "model": plan.model,
        "images": str(len(plan.items)),
        "steps": str(plan.steps),
        "guidance": "" if plan.guidance is None else f"{plan.guidance:g}",
        "resolution": _resolution(folder),
        "dtype": plan.dtype,
        "device": facts.gpu,
        "torch": facts.torch,
        "diffusers": facts.diffusers,
        "toma_diffusion": facts.toma_diffusion,
        "commit": facts.commit,
        "date": folder.date,
    }
    rows = []
    baseline_seconds = None
    for variant in plan.variants:
        found = _figures(folder, variant)
        seconds = found.values.get(SECONDS)
        baseline_seconds = seconds if variant == plan.baseline else baseline_seconds
        row = dict.fromkeys(COLUMNS, "") | common | variant.key
        row |= {name: f"{value:.6g}" for name, value in found.values.items() if name in (SECONDS, *plan.metrics)}
        if seconds and baseline_seconds:
            row["speedup"] = f"{baseline_seconds / seconds:.4f}"
        sources = {name: source for name, source in sorted(found.sources.items()) if source and row[name]}
        row["sources"] = json.dumps(sources, separators=(",", ":"))
        rows.append(row)
    return rows


def _figures(folder: RunFolder, variant: Variant) -> Scores:
    """Of a variant: the averages of its images' time and metrics, and the joint metrics."""
    joint = folder.joint_scores(variant)
    values = {name: value for name, value in joint.values.items() if name in JOINT_METRICS}
    sources = dict(joint.sources)
    of_items = [folder.item_scores(variant, item) for item in folder.plan.items]
    for name in (SECONDS, *IMAGE_METRICS):
        if all(name in scores.values for scores in of_items):
            origins = {scores.sources.get(name, "") for scores in of_items}
            if len(origins) == 1:
                values[name] = AVERAGES.get(name, fmean)([scores.values[name] for scores in of_items])
                sources[name] = origins.pop()
    return Scores(values, sources)


def _resolution(folder: RunFolder) -> str:
    from PIL import Image

    with Image.open(folder.image_path(folder.plan.baseline, folder.plan.items[0])) as image:
        return f"{image.width}x{image.height}"


HEADINGS: Mapping[str, str] = {
    SECONDS: "s",
    "speedup": "speed-up",
    "mse": "MSE ↓",
    "psnr": "PSNR ↑",
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
    "dino": "DINO ↓",
    "clip_t": "CLIP-T ↑",
    "fid": "FID ↓",
    "kid": "KID ↓",
}
FORMATS: Mapping[str, str] = {
    SECONDS: ".3g",
    "speedup": ".2f",
    "mse": ".1f",
    "psnr": ".2f",
    "ssim": ".3f",
    "lpips": ".3f",
    "dino": ".3f",
    "clip_t": ".2f",
    "fid": ".2f",
    "kid": ".4f",
}


def to_rich(folder: RunFolder) -> Table:
    """The table to look at. Columns that are empty in all rows are left out."""
    from rich import box
    from rich.table import Table

    rows = folder.table()
    plan = folder.plan
    shown = [name for name in HEADINGS if any(row[name] for row in rows)]
    title = (
        f"{plan.model}, {rows[0]['images']} images of {rows[0]['resolution']}, {plan.steps} steps, {folder.facts.gpu}"
    )
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for name in shown:
        table.add_column(HEADINGS[name], justify="right", no_wrap=True)
    for variant, row in zip(plan.variants, rows, strict=True):
        table.add_row(variant.title, *(format(float(row[name]), FORMATS[name]) if row[name] else "" for name in shown))
    return table
