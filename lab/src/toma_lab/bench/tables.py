"""The rows of a group as a table to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from toma_lab.bench.group import FLOOR, LOWER_BOUND, Group
from toma_lab.columns import BASELINE
from toma_lab.facts import Facts
from toma_lab.rows import Row, Rows

if TYPE_CHECKING:
    from rich.table import Table

KEY = ("method", "settings", "scope", "assign", "ratio")
MAY_WRAP = {"method": 11, "p20–p80": 7}
"""Columns that give way in a narrow terminal, and how far."""
FIRST = (BASELINE, FLOOR, LOWER_BOUND)


def _figure(column: str, form: str, sign: str = "") -> Callable[[Row], str]:
    return lambda row: f"{float(row[column]):{form}}{sign}" if row.get(column) else ""


COLUMNS: dict[str, Callable[[Row], str]] = {
    "scope": lambda row: row.get("scope", ""),
    "ratio": lambda row: row.get("ratio", ""),
    "ms": _figure("step_ms", ".2f"),
    "p20–p80": lambda row: f"{float(row['step_ms_p20']):.4g} – {float(row['step_ms_p80']):.4g}",
    "speed-up": _figure("speedup", ".2f", "×"),
    "over\nbound": _figure("over_lower_bound", "+.0%"),
    "over\nfloor": _figure("over_floor", "+.0%"),
    "peak\nMiB": _figure("peak_mib", ".0f"),
    "pipeline\ns": _figure("pipeline_s", ".2f"),
    "cache\nhits": _figure("cache_hits", ".0%"),
}


def table_of(group: Group, rows: Rows, facts: Facts) -> Table | None:
    """The latest row of every column of a group, whichever run it is from; None if there is none.

    Columns that are empty in all rows are left out.
    """
    from rich import box
    from rich.table import Table

    latest = {tuple(row.get(name, "") for name in KEY): row for row in rows.matching(group.key | asdict(facts))}
    if not latest:
        return None
    ordered = sorted(latest.values(), key=_order)
    shared = _shared_settings(ordered)
    texts = {"method": lambda row: _method(row, shared), **COLUMNS}
    shown = {heading: text for heading, text in texts.items() if any(text(row) for row in ordered)}
    noted = "; ".join(f"{name}={value}" for name, value in shared.items())
    title = f"{group}; {facts.gpu}, torch {facts.torch}"
    table = Table(title=title, caption=noted and f"all merged with {noted}", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in shown:
        table.add_column(
            heading,
            justify="left" if heading == "method" else "right",
            no_wrap=heading not in MAY_WRAP,
            min_width=MAY_WRAP.get(heading),
            overflow="fold",
        )
    for row in ordered:
        table.add_row(*(text(row) for text in shown.values()))
    return table


def _order(row: Row) -> tuple[bool, str, float, int]:
    """The baseline first; then by scope and ratio the bounds before the methods they bound."""
    rank = FIRST.index(row["method"]) if row["method"] in FIRST else len(FIRST)
    return rank > 0, row.get("scope", ""), float(row.get("ratio") or 0), rank


def _shared_settings(rows: list[Row]) -> dict[str, object]:
    """What is the same in all methods and bounds that merge, such as the blocks that a family leaves alone."""
    settings = [json.loads(row["settings"]) for row in rows if row.get("ratio")]
    first = settings[0] if settings else {}
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in settings)}


def _method(row: Row, shared: dict[str, object]) -> str:
    """The method, and the settings that distinguish it from the others."""
    settings = {name: value for name, value in json.loads(row["settings"]).items() if name not in shared}
    if row["method"] in (FLOOR, LOWER_BOUND):
        settings |= {"assign": "global"} if row.get("assign") == "global" else {}
    return "\n  ".join([row["method"], *(f"{name}={value}" for name, value in settings.items())])
