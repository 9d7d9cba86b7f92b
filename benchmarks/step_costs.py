"""Write the relative costs of steps, with which `toma eval --time-of` computes gains, from the rows of real sizes.

    python benchmarks/step_costs.py

The file is lab/src/toma_lab/step_costs.csv. A test holds it to the rows.
"""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from table_rows import SKIPPING
from toma_lab.columns import SHORTCUTS
from toma_lab.columns.block_caches import FirstBlockCache
from toma_lab.columns.deepcache import DeepCache
from toma_lab.costs import BLOCKS, CACHED, FILE, MERGED, SMALLEST_GRID, TIME_SETTINGS, StepCost
from toma_lab.rows import COLUMNS, Row, read_csv

from toma_diffusion.merge.schedule import Schedule
from toma_diffusion.others import METHODS

RESULTS = Path(__file__).with_name("results")
OLDER = ("denoiser_h200.csv", "methods_h200.csv")
"""Made when all blocks of a kind shared one plan, which no setting said."""
SOURCES = (*OLDER, "presets_h200.csv", "video_h200.csv")
GROUPS: dict[str, dict[str, str]] = {
    "sdxl": {"model": "sdxl", "resolution": "1024x1024", "mode": "graph", "compile": "block", "cache": ""},
    "flux": {"model": "flux", "resolution": "1024x1024", "mode": "compiled", "compile": "block"},
    "wan-480p": {
        "model": "wan-480p",
        "resolution": "832x480",
        "frames": "81",
        "mode": "compiled",
        "compile": "block",
    },
}
"""Which rows count: the kernels alone on SDXL, and what a user gets on the others, where launches take no time."""
NOT_METHODS = ("baseline", "lower-bound", "floor", *SHORTCUTS)


def read(name: str) -> list[Row]:
    """The rows of a file, if there is one. A column that it does not have is empty."""
    path = RESULTS / name
    return [dict.fromkeys(COLUMNS, "") | row for row in read_csv(path)] if path.exists() else []


def rows_of(model: str) -> list[Row]:
    """The rows of that model, from all files, each once, with the setting that older ones do not name."""
    found: dict[tuple[str, ...], Row] = {}
    for source in SOURCES:
        for row in read(source):
            if GROUPS[model].items() <= row.items() and not row["pipeline_s"]:
                if source in OLDER and row["assign"]:  # of ToMA
                    row["settings"] = json.dumps({"share": "plan"} | json.loads(row["settings"]))
                found[tuple(row.values())] = row
    return list(found.values())


def merged_cost(model: str, row: Row) -> StepCost:
    """What a merged step costs, of a row that may merge in some of its steps only."""
    settings: dict[str, Any] = json.loads(row["settings"])
    steps = int(row["steps"])
    schedule = Schedule(window=tuple(settings.get("window", (0.0, 1.0))))
    inside = sum(schedule.action(step, steps) is not None for step in range(steps)) / steps
    mean = float(row["step_ms"]) / float(row["baseline_ms"])
    settings |= {"share": "plan"} if settings.get("share_plan") else {}  # as older rows say it
    extras = {name: settings[name] for name in TIME_SETTINGS if name in settings}
    return StepCost(
        model=model,
        kind=MERGED,
        method=row["method"] if row["method"] in METHODS else "toma",
        preset=row["method"],
        scope=row["scope"],
        assign=row["assign"],
        is_hard=row["assign"] == "global" and settings.get("scale") == "inf",
        ratio=float(row["ratio"]),
        leaves_grids=settings.get("min_tokens", 0) > SMALLEST_GRID[model],
        merged_blocks=round(1 - len(settings.get("skip_blocks", ())) / BLOCKS[model], 4),
        extras=json.dumps(extras, sort_keys=True),
        within_frames=settings.get("region_frames") == 1,
        share=round((mean - (1 - inside)) / inside, 4),
        source=row["commit"],
    )


def merges_alone(row: Row) -> bool:
    """Whether the time of a row is that of merging alone. Older rows reused parts of earlier steps, which is no setting
    any more; in others steps are skipped."""
    settings = json.loads(row["settings"])
    return settings.get("reuse") is None and settings.get("skip") is None and row["method"] not in SKIPPING


def cached_costs(model: str, rows: list[Row]) -> Iterator[StepCost]:
    """What a step costs in which the first-block cache skips blocks: beside whole steps of the cache where it was an
    option, of the model where it was a method."""
    alone = [row for row in rows if row["cache"] and row["method"] == "baseline"]
    whole = [float(row["step_ms"]) for row in alone if not float(row["cache_hits"])]
    timed = [(row, median(whole)) for row in alone if whole]
    timed += [(row, float(row["baseline_ms"])) for row in rows if row["method"] == FirstBlockCache.name]
    for row, whole_step in timed:
        hits = float(row["cache_hits"])
        if hits:
            share = (float(row["step_ms"]) / whole_step - (1 - hits)) / hits
            yield StepCost(
                model=model, kind=CACHED, method=FirstBlockCache.name, share=round(share, 4), source=row["commit"]
            )


def deepcache_costs(model: str) -> Iterator[StepCost]:
    """What a step costs in which DeepCache skips blocks."""
    path = RESULTS / "deepcache_h200.csv"
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["model"] == model:
                name = DeepCache.from_settings({"branch": int(row["branch"])}).skipped_step
                share = float(row["skipped_ms"]) / float(row["whole_ms"])
                yield StepCost(model=model, kind=CACHED, method=name, share=round(share, 4), source=row["commit"])


def costs() -> list[StepCost]:
    """Of all models. Several rows of the same are kept: their median counts."""
    found = []
    for model in GROUPS:
        rows = rows_of(model)
        ours = [row for row in rows if not row["cache"] and row["method"] not in NOT_METHODS]
        merged = [merged_cost(model, row) for row in ours if merges_alone(row)]
        found += sorted(merged, key=lambda cost: (cost.preset, cost.ratio))
        found += [*cached_costs(model, rows), *deepcache_costs(model)]
    return found


def as_csv() -> str:
    """The file's text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(StepCost)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(cost) for cost in costs())
    return text.getvalue()


if __name__ == "__main__":
    FILE.write_text(as_csv(), encoding="utf-8")
    print(f"Wrote {FILE}")
