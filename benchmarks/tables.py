"""Write the tables of docs/speed.md anew from the rows in benchmarks/results/. A test holds the page to them."""

import csv
import re
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "speed.md"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def denoiser_table() -> str:
    """Every method beside its baseline and bounds, a group of rows that were measured in one run after another."""
    lines = [
        "| model | method | scope | removed | ms a step | baseline | speed-up | over bound | over floor | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in read("denoiser_h200.csv") if row["method"] not in ("baseline", "lower-bound", "floor")]
    for group, members in groupby(rows, key=_group):
        for row in members:
            hard = ", hard" if '"scale":"inf"' in row["settings"] else ""
            memory = float(row["peak_mib"]) / float(row["baseline_peak_mib"]) - 1
            lines.append(
                f"| {group} | `{row['method']}`{hard} | {row['scope']} | {row['ratio']} | {float(row['step_ms']):.1f} "
                f"| {float(row['baseline_ms']):.1f} | **{float(row['speedup']):.2f}×** "
                f"| {_percent(row['over_lower_bound'])} | {_percent(row['over_floor'])} | {memory:+.1%} |"
            )
    return "\n".join(lines)


def operator_table() -> str:
    """Every operator at the shapes of SDXL and Flux, beside plain torch and a copy."""
    lines = [
        "| operator | shape | µs | plain torch | | of a copy's bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    for row in read("ops_h200.csv"):
        if row["shape"].startswith("1x") and "x640" in row["shape"]:
            continue  # those are for the growth
        share = float(row["gb_per_s"]) / float(row["copy_gb_per_s"])
        moving = f"{share:.0%}" if "merge" in row["op"] else ""
        lines.append(
            f"| {row['op'].replace('_', ' ')} | {row['shape'].replace('x', '×')} {row['dtype']} "
            f"| {float(row['us']):.1f} | {float(row['reference_us']):.1f} | {float(row['speedup']):.1f}× | {moving} |"
        )
    return "\n".join(lines)


def facts() -> str:
    """The machine, the versions and the commits of all rows."""
    rows = read("denoiser_h200.csv") + read("ops_h200.csv")
    told = {name: sorted({row[name] for row in rows}) for name in ("gpu", "torch", "diffusers", "triton", "commit")}
    return "; ".join(f"{name} {', '.join(value for value in values if value)}" for name, values in told.items())


def rewritten(page: str) -> str:
    """The page with the tables of today."""
    for name, text in (("denoiser", denoiser_table()), ("operators", operator_table()), ("facts", facts())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)  # type: ignore[misc]
    return page


def _group(row: Row) -> str:
    side = row["resolution"].partition("x")[0]
    return f"{row['model']} {side}² {row['dtype']}, batch {row['batch']}, {row['mode']}"


def _percent(value: str) -> str:
    return f"{float(value):+.1%}" if value else ""


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
    print(f"Wrote {PAGE}")
