"""What the tables share: the rows of benchmarks/results/, and how cells are written."""

import csv
import json
from pathlib import Path
from typing import Any

from toma_lab.columns import parse_shortcut, shortcut_class
from toma_lab.rows import COLUMNS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RATIOS = ("0.25", "0.5", "0.75")
USUAL_STEPS = "20"
"""Of the README's table, and by which others are ordered."""
SKIPPING = ("balanced", "fast", "faster")
"""The presets that skip steps."""
AS_IT_WAS = tuple(
    f"num_regions=64; distance_weight=0.0; guidance_parts=1; {shared}; skip_blocks=[]"
    for shared in ("share=plan", "share_plan=True")
)
"""How the changes begin in rows of `toma-stage` as it was before its regions were sized in tokens."""
COMPUTED_STEPS = "computed steps"
"""The source of a gain of what saves whole steps: it is no time."""
MISSING = "—"
"""Where there is no row for a cell."""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    return [row | {"file": name} for row in read_rows(RESULTS / name)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file. Columns that it does not have are empty. What a plan is shared by has the name that it has in
    most rows."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [dict.fromkeys(COLUMNS, "") | row for row in csv.DictReader(file)]
    for row in rows:
        for new, old in (("share_plan=True", "share=plan"), ("share_plan=False", "share=nothing")):
            row["changed"] = row["changed"].replace(new, old)
    return rows


def read_equal_cost(model: str) -> list[Row]:
    """The rows of a demo model with skipped steps: of a GPU, or of a CPU as long as there are none of a GPU."""
    name = f"quality_{model}.csv"
    rows = read(name) if (RESULTS / name).exists() else []
    return rows if any(row["run"] == "skip" for row in rows) else read(f"quality_{model}_cpu.csv")


def line_of(row: Row) -> tuple[str, str]:
    """The method of a row, and its settings without the one that trades time for quality: one line of a plot."""
    method, *_ = row["method"].split("+")
    if shortcut_class(method) is not None:
        return parse_shortcut(row["shortcuts"]).line
    shortcuts = [f"+ {parse_shortcut(text).title}" for text in row["shortcuts"].split("+") if text]
    return method, ", ".join(filter(None, (row["changed"].replace("; ", ", "), *shortcuts)))


def point_of(row: Row) -> str:
    """The ratio, the number of steps, the threshold or the interval of a row."""
    method, *_ = row["method"].split("+")
    if shortcut_class(method) is not None:
        return parse_shortcut(row["shortcuts"]).point
    return "" if method in SKIPPING else row["ratio"].removesuffix(".0")


def setting_of(row: Row, name: str) -> str:
    """A setting of merging. Older rows have a column for each."""
    if row.get(name) or not row.get("column"):
        return row.get(name, "")
    own: dict[str, Any] = json.loads(row["column"])["own"] or {}
    return str((own.get("merge") or {"settings": {}})["settings"].get(name, ""))


def gain_of(row: Row | None) -> str:
    """The gain, bold if it is one in time: of what merges tokens. Others count computed steps."""
    if row is None or not row["gain"]:
        return MISSING
    gain = f"{float(row['gain']):.2f}×"
    return gain if row["gain_source"] == COMPUTED_STEPS else f"**{gain}**"


def head(columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {columns} |".replace("|  |", "| |"), "|" + "---|" * (columns.count("|") + 1)]


def label_of_quality(row: Row) -> str:
    """The preset of a row of quality, as it was where its settings have changed since; and the paper's softmax."""
    if row["changed"].startswith(AS_IT_WAS):
        return f"`{row['method']}` as it was"
    return f"`{row['method']}`" + (", `scale=1000`" if row["changed"] == "scale=1000.0" else "")


def figure(value: str, digits: int) -> str:
    if not value:
        return ""
    return "∞" if value == "inf" else f"{float(value):.{digits}f}"


def percent(value: str) -> str:
    return f"{float(value):+.1%}" if value else ""
