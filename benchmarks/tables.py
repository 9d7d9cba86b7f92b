"""Write the tables of the README and docs/ anew from the rows in benchmarks/results/. A test holds the pages to them.

A page says where a table stands, and this file what is in it, one function a name:

    <!-- rows: headline -->
    <!-- end -->
"""

import csv
import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from toma_diffusion.evaluation import Variant

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
METHODS = ("tomesd", "tofu", "todo", "toma", "toma-stripe", "toma-tile", "toma-once", "fast", "balanced", "lower-bound")
"""In the order of the paper's Tables 1 and 9, ours after them."""
FILES = ("denoiser_h200.csv", "methods_h200.csv", "merge_h200.csv", "ops_h200.csv")
RATIOS = ("0.25", "0.5", "0.75")
BASE_OF_SETTINGS = ("assign=local", "scale=1000.0")
"""What all rows of `settings` and `together` share: `BASE` in quality.py."""
HEADLINE_MODELS = {
    "SDXL": {"model": "sdxl", "resolution": "1024x1024", "mode": "graph", "compile": "block", "steps": "10"},
    "Flux.1-dev": {"model": "flux", "resolution": "1024x1024", "mode": "compiled", "compile": "block", "steps": "4"},
}
"""Models in the README's table. One group of rows each, so that all speed-ups of a column have the same baseline."""
HEADLINE_SETTINGS = {
    "`balanced`": RATIOS,
    "`fast`": RATIOS,
    "`toma-once`": ("0.5",),
    "`toma-tile`": ("0.5",),
    "`toma`": ("0.5",),
    "`toma`, `scale=1000`": ("0.5",),
    "`tomesd`": ("0.5",),
    "`tofu`": ("0.5",),
    "`todo`": ("0.75",),
}
"""Its rows: the default first, then from fast to slow, then other methods."""
HEADLINE_STEPS = "20"
HEADLINE_CHANGES = ("", "scale=1000.0")
"""Of the demo model's images."""
NOTES = {"`balanced`": "default", "`toma`, `scale=1000`": "the paper's softmax"}
MISSING = "—"
"""Where there is no row for a cell."""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def headline_table() -> str:
    """A few settings: the speed-up of a denoiser step, and how near the demo model's images stay."""
    lines = _head(
        " | ".join(
            ["preset", "tokens removed", *(f"{name}, speed-up" for name in HEADLINE_MODELS), "LPIPS", "PSNR, dB"]
        )
    )
    quality = {
        (_label_of_quality(row), row["ratio"]): row
        for row in read("quality_bundled.csv")
        if (row["run"], row["steps"]) == ("presets", HEADLINE_STEPS) and row["changed"] in HEADLINE_CHANGES
    }
    speed = {name: _newest(group) for name, group in HEADLINE_MODELS.items()}
    for label, ratios in HEADLINE_SETTINGS.items():
        for ratio in ratios:
            speeds = [speed[name].get((label, ratio)) for name in HEADLINE_MODELS]
            near = quality.get((label, ratio))
            cells = [
                label + (f" ({NOTES[label]})" if label in NOTES else ""),
                f"{float(ratio):.0%}",
                *(MISSING if row is None else f"**{float(row['speedup']):.2f}×**" for row in speeds),
                *(
                    MISSING if near is None else _figure(near[name], digits)
                    for name, digits in (("lpips", 3), ("psnr", 1))
                ),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def headline_facts() -> str:
    """What the speed-ups of the README's table were measured on, and against what."""
    used = {
        name: [row for key, row in _newest(group).items() if key[1] in HEADLINE_SETTINGS.get(key[0], ())]
        for name, group in HEADLINE_MODELS.items()
    }
    rows = [row for found in used.values() for row in found]
    versions = [f"{name} {', '.join(sorted({row[name] for row in rows}))}" for name in ("torch", "diffusers", "triton")]
    how = {
        "none": "not compiled",
        "block": "compiled block by block",
        "whole": "compiled whole",
        "graphs": "compiled whole, CUDA graphs",
    }
    models = [
        f"{name}: {first['dtype']}, batch {first['batch']}, {how[first['compile']]}"
        + (", CUDA graphs" if first["mode"] == "graph" else "")
        for name, (first, *_) in used.items()
    ]
    return (
        f"{', '.join(sorted({row['gpu'] for row in rows}))}, {', '.join(versions)}, "
        f"attention {', '.join(sorted({row['attention'] for row in rows}))}, "
        f"commits {', '.join(sorted({row['commit'] for row in rows}))}. {'; '.join(models)}; the baselines alike."
    )


def explain_table() -> str:
    """How near the patches of an image come back, by the way destinations are chosen."""
    titles = {
        "facility-location": "destinations by facility location",
        "random": "random destinations",
        "strided": "every n-th token",
    }
    rows = read("explain.csv")
    tokens, regions = rows[0]["tokens_before"], rows[0]["regions"]
    lines = _head(
        " | ".join([f"PSNR in dB, {tokens} tokens in {regions}", *(f"{float(r):.0%} removed" for r in RATIOS)])
    )
    for selection, title in titles.items():
        found = {row["ratio"]: f"{float(row['psnr_db']):.1f}" for row in rows if row["selection"] == selection}
        lines.append("| " + " | ".join([title, *(found.get(ratio, MISSING) for ratio in RATIOS)]) + " |")
    return "\n".join(lines)


def denoiser_table() -> str:
    """Every method with its baseline and bounds, grouped by run."""
    lines = _head(
        "model | method | scope | removed | ms a step | baseline | speed-up | over bound | over floor | memory"
    )
    rows = [row for row in read("denoiser_h200.csv") if row["method"] not in ("baseline", "lower-bound", "floor")]
    for group, members in groupby([row for row in rows if not row["cache"] and not row["pipeline_s"]], key=_group):
        for row in members:
            memory = float(row["peak_mib"]) / float(row["baseline_peak_mib"]) - 1
            lines.append(
                f"| {group} | {_label(row)} | {row['scope']} | {row['ratio']} | {float(row['step_ms']):.1f} "
                f"| {float(row['baseline_ms']):.1f} | **{float(row['speedup']):.2f}×** "
                f"| {_percent(row['over_lower_bound'])} | {_percent(row['over_floor'])} | {memory:+.1%} |"
            )
    return "\n".join(lines)


def pipeline_table() -> str:
    """Rows of few steps, and the time of an image with text encoders and decoder."""
    lines = _head("model | steps | method | removed | ms a step | speed-up | s an image | of the baseline's | speed-up")
    for row in read("denoiser_h200.csv"):
        if row["pipeline_s"] and row["ratio"]:
            image, baseline = float(row["pipeline_s"]), float(row["baseline_pipeline_s"])
            lines.append(
                f"| {_group(row)} | {row['steps']} | {_label(row)} | {row['ratio']} | {float(row['step_ms']):.1f} "
                f"| **{float(row['speedup']):.2f}×** | {image:.3f} | {baseline:.3f} | **{baseline / image:.2f}×** |"
            )
    return "\n".join(lines)


def cache_table() -> str:
    """A first-block cache alone and with merging, compared with the model without either."""
    rows = [row for row in read("denoiser_h200.csv") if row["cache"]]
    alone = {row["cache"]: float(row["step_ms"]) for row in rows if not row["ratio"]}
    whole = alone[min(alone, key=float)]  # so low a threshold that nothing is skipped
    lines = _head(
        "threshold | steps skipped | method | removed | ms a step, cache alone | with merging | by merging | both"
    )
    for row in rows:
        if row["ratio"]:
            own = float(row["step_ms"])
            lines.append(
                f"| {row['cache']} | {float(row['cache_hits']):.0%} | {_label(row)} | {row['ratio']} "
                f"| {alone[row['cache']]:.1f} | {own:.1f} | **{float(row['speedup']):.2f}×** | **{whole / own:.2f}×** |"
            )
    return "\n".join(lines)


def merging_table() -> str:
    """Merging and unmerging alone, µs, laid out as the paper's Tables 4 and 5."""
    lines = _head("tokens | operator | ToMA | ToMeSD, our code | ToMeSD, its package | ToMA against the faster one")
    rows = read("merge_h200.csv")
    for grid, ratio in dict.fromkeys((row["shape"].partition(",")[0], row["ratio"]) for row in rows):
        here = {row["op"]: row for row in rows if (row["shape"].partition(",")[0], row["ratio"]) == (grid, ratio)}
        for name in ("merge", "unmerge"):
            ours, theirs = float(here[name]["us"]), here[f"tomesd_{name}"]
            other, package = float(theirs["us"]), float(theirs["reference_us"])
            lines.append(
                f"| {grid.replace('x', '×')}, {ratio} removed | {name} | {ours:.1f} | {other:.1f} | {package:.1f} "
                f"| {min(other, package) / ours:.1f}× |"
            )
    return "\n".join(lines)


def methods_table() -> str:
    """Methods by ratios, milliseconds a step and speed-up, laid out as the paper's Tables 1 and 9."""
    lines = _head(" | ".join(["", "method", *RATIOS]))
    rows = read("methods_h200.csv")
    for group in dict.fromkeys(map(_group, rows)):
        members = [row for row in rows if _group(row) == group]
        baseline = [float(row["step_ms"]) for row in members if row["method"] == "baseline"]
        spread = f"{min(baseline):.1f}" + (f" to {max(baseline):.1f}" if len(baseline) > 1 else "")
        lines.append(f"| {group} | none | {spread} | | |")
        shown = [row for name in METHODS for row in members if row["method"] == name and _is_bound_of_local(row)]
        for label in dict.fromkeys(map(_label, shown)):
            found = {
                row["ratio"]: f"{float(row['step_ms']):.1f} ({float(row['speedup']):.2f}×)"
                for row in shown
                if _label(row) == label
            }
            lines.append(f"| {group} | {label} | " + " | ".join(found.get(ratio, "") for ratio in RATIOS) + " |")
    return "\n".join(lines)


def operator_table() -> str:
    """Every operator at the shapes of SDXL and Flux, compared with plain torch and a copy."""
    lines = _head("operator | shape | µs | plain torch | | of a copy's bandwidth")
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


def quality_table(*runs: str) -> str:
    """Rows of the demo model: how far images are from those without merging."""
    figures = {"psnr": ("PSNR, dB", 1), "ssim": ("SSIM", 3), "lpips": ("LPIPS", 3), "fid": ("FID", 0)}
    rows = [
        row for row in read("quality_bundled.csv") if row["run"] in runs and (row["ratio"] or row["run"] == runs[0])
    ]
    figures = {name: figure for name, figure in figures.items() if any(row[name] for row in rows)}
    lines = _head(" | ".join(["", "ratio", *(title for title, _ in figures.values())]))
    for row in rows:
        cells = [_figure(row[name], digits) for name, (_, digits) in figures.items()]
        lines.append("| " + " | ".join([_changes(row), row["ratio"], *cells]) + " |")
    return "\n".join(lines)


def equal_time_table(runs: list[str], model: str, steps: str) -> str:
    """Rows of a demo model at one number of steps: gain in time, and distance from the model's own images."""
    figures = {"gain": ("gain", 2), "lpips": ("LPIPS", 4), "psnr": ("PSNR, dB", 1), "ssim": ("SSIM", 3)}
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] in runs and row["steps"] == steps]
    if not rows:
        raise ValueError(f"quality_{model}.csv has no rows of {' or '.join(runs)} at {steps} steps.")
    common = _common_changes(rows)
    lines = _head(" | ".join(["", "setting", *(title for title, _ in figures.values())]))
    for row in rows:
        variant = Variant.from_dict(json.loads(row["variant"]))
        cells = [_figure(row[name], digits) for name, (_, digits) in figures.items()]
        cells[0] += "×" if cells[0] else ""
        lines.append("| " + " | ".join([_title(variant, row, common), variant.point, *cells]) + " |")
    if common:
        lines.append(f"\nAll with {', '.join(f'`{part}`' for part in common)}.")
    return "\n".join(lines)


def quality_facts(model: str) -> str:
    """What the rows of a demo model were measured on, and for which large model its gains were computed."""
    rows = read(f"quality_{model}.csv")

    def of(name: str) -> str:
        return ", ".join(sorted({row[name] for row in rows if row[name]}))

    return (
        f"{of('images')} prompts, guidance {of('guidance') or 'of the pipeline'}, {of('dtype')}, {of('gpu')}, "
        f"torch {of('torch')}, diffusers {of('diffusers')}, commits {of('commit')}. "
        f"Gains are those of {of('gain_source')}."
    )


def facts() -> str:
    """The machine, the versions and the commits of all rows."""
    rows = [row for name in FILES for row in read(name)]
    found = {name: sorted({row[name] for row in rows}) for name in ("gpu", "torch", "diffusers", "triton", "commit")}
    return "; ".join(f"{name} {', '.join(value for value in values if value)}" for name, values in found.items())


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline_table,
    "headline facts": headline_facts,
    "explain": explain_table,
    "denoiser": denoiser_table,
    "pipeline": pipeline_table,
    "cache": cache_table,
    "methods": methods_table,
    "merging": merging_table,
    "operators": operator_table,
    "facts": facts,
}
"""What a page may name, besides `quality of presets and unseen`, `quality of steps and presets on bundled at 20 steps`
and `quality facts of bundled`, which is the model in the name of the rows' file."""
EQUAL_TIME = re.compile(r"quality of (.+) on (\S+) at (\d+) steps")


def rewritten(page: str) -> str:
    """The page with the tables of today."""
    if page.count("<!-- rows: ") != page.count("<!-- end -->"):
        raise ValueError("every `<!-- rows: NAME -->` needs its `<!-- end -->`, and the other way round.")
    return re.sub(r"(<!-- rows: (.*?) -->\n)(.*?)(<!-- end -->)", _filled_in, page, flags=re.DOTALL)


def _filled_in(marked: re.Match[str]) -> str:
    name = marked[2]
    if at := EQUAL_TIME.fullmatch(name):
        text = equal_time_table(at[1].split(" and "), at[2], at[3])
    elif name.startswith("quality facts of "):
        text = quality_facts(name.removeprefix("quality facts of "))
    elif name.startswith("quality of "):
        text = quality_table(*name.removeprefix("quality of ").split(" and "))
    elif name in TABLES:
        text = TABLES[name]()
    else:
        raise ValueError(
            f"`<!-- rows: {name} -->` names no table; use one of {', '.join(TABLES)}, or `quality of RUN`."
        )
    return f"{marked[1]}{text}\n{marked[4]}"


def _head(columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {columns} |".replace("|  |", "| |"), "|" + "---|" * (columns.count("|") + 1)]


def _group(row: Row) -> str:
    side = row["resolution"].partition("x")[0]
    how = row["mode"] + (", not compiled" if (row["mode"], row["compile"]) == ("graph", "none") else "")
    return f"{row['model']} {side}² {row['dtype']}, batch {row['batch']}, {how}"


def _label(row: Row) -> str:
    """The preset, and the paper's softmax in place of the hard assignment that `toma` has had since."""
    is_soft = row["method"] == "toma" and '"scale":"inf"' not in row["settings"]
    return f"`{row['method']}`" + (", `scale=1000`" if is_soft else "")


def _label_of_quality(row: Row) -> str:
    """The same, of a row of quality_bundled.csv."""
    return f"`{row['method']}`" + (", `scale=1000`" if row["changed"] == "scale=1000.0" else "")


def _newest(group: dict[str, str]) -> dict[tuple[str, str], Row]:
    """Of every setting and ratio the row of that group that was measured last."""
    rows = [*read("denoiser_h200.csv"), *read("methods_h200.csv")]
    found = [row for row in rows if row["ratio"] and not row["cache"] and group.items() <= row.items()]
    return {(_label(row), row["ratio"]): row for row in sorted(found, key=lambda row: row["date"])}


def _is_bound_of_local(row: Row) -> bool:
    """The paper's lower bound is of local regions; that of a global assignment belongs to `toma` alone."""
    return row["method"] != "lower-bound" or row["assign"] == "local"


def _changes(row: Row) -> str:
    """The method, and the fields that differ from its preset's; in sweeps of settings, those alone."""
    if not row["ratio"]:
        return row["method"]  # nothing is merged
    parts = [part for part in row["changed"].split("; ") if part]
    if row["run"] in ("settings", "together"):
        return ", ".join(f"`{part}`" for part in parts if part not in BASE_OF_SETTINGS) or "nothing"
    return ", ".join(f"`{part}`" for part in (row["method"], *parts))


def _common_changes(rows: list[Row]) -> list[str]:
    """Fields that all rows of a table have changed in the same way."""
    first, *others = [row["changed"].split("; ") for row in rows]
    return [part for part in first if others and part and all(part in other for other in others)]


def _title(variant: Variant, row: Row, common: list[str]) -> str:
    """What is merged and what else saves time, without what is common to the table and without the row's number."""
    if not variant.saves_time:
        return variant.name
    if variant.config is None:
        return ", ".join(f"`{part}`" for part in variant.family if part)
    own = [part for part in row["changed"].split("; ") if part and part not in common]
    merging = ", ".join(f"`{part}`" for part in (variant.name, *own))
    return " + ".join([merging, *(f"`{shortcut.text}`" for shortcut in variant.shortcuts)])


def _figure(value: str, digits: int) -> str:
    if not value:
        return ""
    return "∞" if value == "inf" else f"{float(value):.{digits}f}"


def _percent(value: str) -> str:
    return f"{float(value):+.1%}" if value else ""


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if (new := rewritten(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"Wrote {page}")
