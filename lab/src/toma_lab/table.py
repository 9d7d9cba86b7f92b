"""The table of an evaluation, made from its folder: one row a column."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from toma_lab.columns import NOISE_FLOOR, Column
from toma_lab.costs import StepCosts
from toma_lab.evaluate import BASE, EvalFolder, sources_of
from toma_lab.metrics import JOINT_METRICS
from toma_lab.metrics.pixels import pool_psnr
from toma_lab.rows import QUALITY, Row, number

if TYPE_CHECKING:
    from rich.table import Table

MEASURED = "measured"
AVERAGES: Mapping[str, Callable[[Sequence[float]], float]] = {"seconds": median, "psnr": pool_psnr}
"""How values are combined that are not averaged by the mean."""


def rows_of(folder: EvalFolder, columns: Sequence[Column]) -> list[Row]:
    """One row a column. A value that some of its pictures lack is left empty: it would not be comparable."""
    plan, rows = folder.plan, []
    costs = StepCosts.load(plan.time_of) if plan.time_of else None
    common = folder.common_cells() | {"images": len(plan.items)}
    for column in columns:
        values, sources = _figures(folder, column)
        row = common | column.cells | _size(folder, column)
        row |= {name: f"{value:.6g}" for name, value in values.items()}
        row |= _computed(folder, column, values.get("skipped", 0.0))
        speedup = _speedup(folder, column)
        row["speedup"] = "" if speedup is None else f"{speedup:.4f}"
        gain = speedup
        if costs is not None:
            cached = values.get("skipped", 0.0)
            is_floor = column.name == NOISE_FLOOR
            gain = None if is_floor else costs.gain(plan.steps, column, cached=cached, blocks=plan.blocks)
        if gain is not None:
            row |= {"gain": f"{gain:.4f}", "gain_source": plan.time_of or MEASURED}
        row["sources"] = json.dumps({name: sources[name] for name in sorted(sources)}, separators=(",", ":"))
        rows.append(row)
    return rows


def _figures(folder: EvalFolder, column: Column) -> tuple[dict[str, float], dict[str, str]]:
    """The averages over the pictures of a column, and its joint metrics; and the weights that they were made with."""
    values, sources = dict[str, float](), dict[str, str]()
    joint, of_items = folder.joint_row(column), [folder.item_row(column, item) for item in folder.plan.items]
    for name in JOINT_METRICS:
        if name in joint:
            values[name], sources[name] = float(joint[name]), sources_of(joint)[name]
    for name in ("seconds", "skipped", *(each for each in QUALITY if each not in JOINT_METRICS)):
        found = [number(row, name) for row in of_items]
        known = [value for value in found if value is not None]
        origins = {sources_of(row).get(name, "") for row in of_items}
        if len(known) == len(found) and len(origins) == 1:
            values[name] = AVERAGES.get(name, fmean)(known)
            sources |= dict.fromkeys([name], origin) if (origin := origins.pop()) else {}
    return values, sources


def _computed(folder: EvalFolder, column: Column, skipped: float) -> Row:
    """How many steps are computed, by the calls for which the denoiser ran. Guidance may take two calls a step."""
    first, steps = folder.plan.items[0], folder.plan.steps
    own, base = (number(folder.item_row(each, first), "calls") for each in (column, BASE))
    return {"computed": f"{own / base * steps * (1 - skipped):.4g}"} if own and base else {}


def _speedup(folder: EvalFolder, column: Column) -> float | None:
    """The median over the pictures of baseline seconds / column seconds.

    The two times of a picture were measured one shortly after the other, so that a busy machine changes their ratio
    less than it changes the median times.
    """
    ratios = []
    for item in folder.plan.items:
        own, base = (number(folder.item_row(each, item), "seconds") for each in (column, BASE))
        if not own or not base:
            return None
        ratios.append(base / own)
    return median(ratios)


def _size(folder: EvalFolder, column: Column) -> Row:
    """Width × height, and the frames of a clip."""
    row = folder.item_row(column, folder.plan.items[0])
    return {name: row.get(name, "") for name in ("resolution", "frames")}


_SHOWN: Mapping[str, tuple[str, str]] = {
    "seconds": ("s", ".3g"),
    "speedup": ("speed-up", ".2f"),
    "gain": ("gain", ".2f"),
    "mse": ("MSE ↓", ".1f"),
    "psnr": ("PSNR ↑", ".2f"),
    "ssim": ("SSIM ↑", ".3f"),
    "lpips": ("LPIPS ↓", ".3f"),
    "dino": ("DINO ↓", ".3f"),
    "clip_t": ("CLIP-T ↑", ".2f"),
    "flicker": ("Flicker ↓", ".2f"),
    "fid": ("FID ↓", ".2f"),
    "kid": ("KID ↓", ".4f"),
}
HEADINGS: Mapping[str, str] = {name: heading for name, (heading, _) in _SHOWN.items()}
FORMATS: Mapping[str, str] = {name: form for name, (_, form) in _SHOWN.items()}


def to_rich(folder: EvalFolder) -> Table:
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
    for column, row in zip(plan.columns, rows, strict=True):
        table.add_row(column.title, *(format(float(row[name]), FORMATS[name]) if row[name] else "" for name in shown))
    return table
