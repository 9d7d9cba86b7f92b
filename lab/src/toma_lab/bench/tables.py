"""The rows of a group as a table to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from toma_lab.bench.bounds import FLOOR, LOWER_BOUND
from toma_lab.bench.records import Records
from toma_lab.bench.scenario import BASELINE, Group
from toma_lab.experiments.facts import Facts

if TYPE_CHECKING:
    from rich.table import Table

CELL = ("method", "settings", "scope", "assign", "ratio")
MAY_WRAP = {"method": 11, "p20–p80": 7}
"""Columns that give way in a narrow terminal, and how far."""
Record = dict[str, str]


def table_of(group: Group, records: Records, facts: Facts) -> Table | None:
    """The latest row of every cell of a group, whichever run it is from; None if there is none.

    Columns that are empty in all rows are left out.
    """
    from rich import box
    from rich.table import Table

    latest = {tuple(row[name] for name in CELL): row for row in records.matching(group.key | asdict(facts))}
    if not latest:
        return None
    rows = sorted(latest.values(), key=_order)
    shared = _shared_settings(rows)
    texts = {"method": lambda row: _method(row, shared), **COLUMNS}
    shown = {heading: text for heading, text in texts.items() if any(text(row) for row in rows)}
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
    for row in rows:
        table.add_row(*(text(row) for text in shown.values()))
    return table


def _order(row: Record) -> tuple[int, int, str]:
    """The baseline first; then by scope and ratio the bounds before the methods they bound."""
    methods = (BASELINE, FLOOR, LOWER_BOUND)
    scopes = ("", "module", "block", "stage")
    rank = methods.index(row["method"]) if row["method"] in methods else len(methods)
    return scopes.index(row["scope"]), rank if rank == 0 else 1, f"{float(row['ratio'] or 0):.4f} {rank}"


def _shared_settings(rows: list[Record]) -> dict[str, object]:
    """What is the same in all methods and bounds, such as the blocks that a family leaves alone."""
    settings = [json.loads(row["settings"]) for row in rows if row["method"] != BASELINE]
    first = settings[0] if settings else {}
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in settings)}


def _method(row: Record, shared: dict[str, object]) -> str:
    """The method, and the settings that distinguish it from the others."""
    settings = {name: value for name, value in json.loads(row["settings"]).items() if name not in shared}
    if row["method"] in (FLOOR, LOWER_BOUND):
        settings.pop("selection", None)
        settings |= {"assign": "global"} if row["assign"] == "global" else {}
    return "\n  ".join([row["method"], *(f"{name}={value}" for name, value in settings.items())])


def _percent(column: str, form: str) -> Callable[[Record], str]:
    return lambda row: format(float(row[column]), form) if row[column] else ""


COLUMNS: dict[str, Callable[[Record], str]] = {
    "scope": lambda row: row["scope"],
    "ratio": lambda row: row["ratio"],
    "ms": lambda row: f"{float(row['step_ms']):.2f}",
    "p20–p80": lambda row: f"{float(row['step_ms_p20']):.4g} – {float(row['step_ms_p80']):.4g}",
    "speed-up": lambda row: f"{float(row['speedup']):.2f}×",
    "over\nbound": _percent("over_lower_bound", "+.0%"),
    "over\nfloor": _percent("over_floor", "+.0%"),
    "peak\nMiB": lambda row: f"{float(row['peak_mib']):.0f}" if row["peak_mib"] else "",
    "pipeline\ns": lambda row: f"{float(row['pipeline_s']):.2f}" if row["pipeline_s"] else "",
    "cache\nhits": _percent("cache_hits", ".0%"),
}
