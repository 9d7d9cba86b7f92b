"""Tables of times: denoisers, pipelines and operators."""

import json
from itertools import groupby

from table_rows import MISSING, RATIOS, Row, head, percent, read

METHODS = (
    "tomesd",
    "tofu",
    "todo",
    "toma",
    "toma-stripe",
    "toma-tile",
    "toma-once",
    "toma-stage",
    "toma-late",
    "lower-bound",
)
"""In the order of the paper's Tables 1 and 9, ours after them."""
FILES = (
    *("presets_h200.csv", "today_h200.csv", "video_h200.csv", "pipeline_h200.csv"),
    *("denoiser_h200.csv", "methods_h200.csv", "merge_h200.csv", "ops_h200.csv"),
)
PRESETS_NOW = "presets_h200.csv"
"""Where the presets are timed as they are now."""
OLDER = ("denoiser_h200.csv", "methods_h200.csv")
"""`toma-stage` and `toma-late` of these are as they were before."""
LARGER_MODELS = {
    "flux2": "FLUX.2-dev",
    "flux2-klein": "FLUX.2-klein 9B",
    "qwen-image": "Qwen-Image",
    "z-image": "Z-Image",
    "krea2": "Krea 2",
    "wan-480p": "Wan 14B",
    "wan": "Wan 14B",
    "ltx2": "LTX-2",
    "h3": "MiniMax-H3",
    "hunyuan15": "HunyuanVideo 1.5",
}
"""Models after Flux.1 in the README's second table."""


def speed_up(row: Row) -> str:
    return f"**{float(row['speedup']):.2f}×**"


def presets_table() -> str:
    """The presets as they are now, and `toma-stage` as it was."""
    lines = head("model | method | scope | removed | ms a step | baseline | speed-up | memory")
    for row in read(PRESETS_NOW):
        if row["ratio"]:
            lines.append(
                f"| {_group(row)} | {label_of(row)} | {row['scope']} | {row['ratio']} | {float(row['step_ms']):.2f} "
                f"| {float(row['baseline_ms']):.2f} | {speed_up(row)} | {_memory(row)} |"
            )
    return "\n".join(lines)


def timed_table(name: str) -> str:
    """All rows of a file, each with its baseline: `today` is today_h200.csv. Of a setting that was timed again, the
    last."""
    rows = [row for row in read(f"{name}_h200.csv") if row["ratio"] and row["method"] != "floor"]
    newest = {(f"{row['model']}, {_size(row)}", row["steps"], _setting(row), row["ratio"]): row for row in rows}
    lines = head("model | steps | method | removed | ms a step | baseline | speed-up | memory")
    models = [*dict.fromkeys(model for model, *_ in newest)]
    for (model, steps, setting, ratio), row in sorted(newest.items(), key=lambda item: models.index(item[0][0])):
        lines.append(
            f"| {model} | {steps} | {setting} | {f'{float(ratio):.0%}' if float(ratio) else ''} "
            f"| {_milliseconds(row['step_ms'])} | {_milliseconds(row['baseline_ms'])} | {speed_up(row)} "
            f"| {_memory(row)} |"
        )
    return "\n".join(lines)


LARGER_COLUMNS = {
    "`toma-stage`, 50% of the tokens removed": ("`toma-stage`", "0.5"),
    "75%": ("`toma-stage`", "0.75"),
}
"""A setting and its ratio."""


def larger_table() -> str:
    """Merging on models after Flux.1, in the README."""
    lines = head(" | ".join(["speed-up", *LARGER_COLUMNS]))
    rows = [row for name in ("today", "video") for row in read(f"{name}_h200.csv") if row["ratio"]]
    for model, name in LARGER_MODELS.items():
        for size in dict.fromkeys(_size(row) for row in rows if row["model"] == model):
            here = [row for row in rows if (row["model"], _size(row)) == (model, size)]
            found = {(_setting(row), row["ratio"]): row for row in here}
            cells = [speed_up(found[key]) if key in found else MISSING for key in LARGER_COLUMNS.values()]
            lines.append("| " + " | ".join([f"{name}, {size}", *cells]) + " |")
    return "\n".join(lines)


def _size(row: Row) -> str:
    width, _, height = row["resolution"].partition("x")
    size = f"{width}²" if width == height else f"{width}×{height}"
    return f"{size}, {row['frames']} frames" if row["frames"] else size


def _setting(row: Row) -> str:
    """A preset or method, and where it merges in clips."""
    within = json.loads(row["settings"]).get("region_frames") == 1
    return f"`{row['method']}`" + (", within frames" if within else "")


def _memory(row: Row) -> str:
    """The peak, compared with the baseline's."""
    return f"{float(row['peak_mib']) / float(row['baseline_peak_mib']) - 1:+.1%}"


def _milliseconds(value: str) -> str:
    return f"{float(value):.4g}" if float(value) < 1000 else f"{float(value):,.0f}"


def denoiser_table() -> str:
    """Every method with its baseline and bounds, grouped by run."""
    lines = head(
        "model | method | scope | removed | ms a step | baseline | speed-up | over bound | over floor | memory"
    )
    rows = [row for row in read("denoiser_h200.csv") if row["method"] not in ("baseline", "lower-bound", "floor")]
    for group, members in groupby([row for row in rows if not row["cache"] and not row["pipeline_s"]], key=_group):
        for row in members:
            lines.append(
                f"| {group} | {label_of(row)} | {row['scope']} | {row['ratio']} | {float(row['step_ms']):.1f} "
                f"| {float(row['baseline_ms']):.1f} | {speed_up(row)} "
                f"| {percent(row['over_lower_bound'])} | {percent(row['over_floor'])} | {_memory(row)} |"
            )
    return "\n".join(lines)


def pipeline_table() -> str:
    """Rows of few steps, and the time of an image with text encoders and decoder."""
    lines = head("model | steps | method | removed | ms a step | speed-up | s an image | of the baseline's | speed-up")
    for row in [*read("pipeline_h200.csv"), *read("denoiser_h200.csv")]:
        if row["pipeline_s"] and row["ratio"]:
            image, baseline = float(row["pipeline_s"]), float(row["baseline_pipeline_s"])
            lines.append(
                f"| {_group(row)} | {row['steps']} | {label_of(row)} | {row['ratio']} | {float(row['step_ms']):.1f} "
                f"| {speed_up(row)} | {image:.3f} | {baseline:.3f} | **{baseline / image:.2f}×** |"
            )
    return "\n".join(lines)


def cache_table() -> str:
    """A first-block cache alone and with merging, compared with the model without either."""
    rows = [row for row in read("denoiser_h200.csv") if row["cache"]]
    alone = {row["cache"]: float(row["step_ms"]) for row in rows if not row["ratio"]}
    whole = alone[min(alone, key=float)]  # so low a threshold that nothing is skipped
    lines = head(
        "threshold | steps skipped | method | removed | ms a step, cache alone | with merging | by merging | both"
    )
    for row in rows:
        if row["ratio"]:
            own = float(row["step_ms"])
            lines.append(
                f"| {row['cache']} | {float(row['cache_hits']):.0%} | {label_of(row)} | {row['ratio']} "
                f"| {alone[row['cache']]:.1f} | {own:.1f} | {speed_up(row)} | **{whole / own:.2f}×** |"
            )
    return "\n".join(lines)


def merging_table() -> str:
    """Merging and unmerging alone, µs, laid out as the paper's Tables 4 and 5."""
    lines = head("tokens | operator | ToMA | ToMeSD, our code | ToMeSD, its package | ToMA against the faster one")
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
    lines = head(" | ".join(["", "method", *RATIOS]))
    rows = read("methods_h200.csv")
    for group in dict.fromkeys(map(_group, rows)):
        members = [row for row in rows if _group(row) == group]
        baseline = [float(row["step_ms"]) for row in members if row["method"] == "baseline"]
        spread = f"{min(baseline):.1f}" + (f" to {max(baseline):.1f}" if len(baseline) > 1 else "")
        lines.append(f"| {group} | none | {spread} | | |")
        shown = [row for name in METHODS for row in members if row["method"] == name and _is_bound_of_local(row)]
        for label in dict.fromkeys(map(label_of, shown)):
            found = {
                row["ratio"]: f"{float(row['step_ms']):.1f} ({float(row['speedup']):.2f}×)"
                for row in shown
                if label_of(row) == label
            }
            lines.append(f"| {group} | {label} | " + " | ".join(found.get(ratio, "") for ratio in RATIOS) + " |")
    return "\n".join(lines)


def operator_table() -> str:
    """Every operator at the shapes of SDXL and Flux, compared with plain torch and a copy."""
    lines = head("operator | shape | µs | plain torch | | of a copy's bandwidth")
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
    rows = [row for name in FILES for row in read(name)]
    found = {name: sorted({row[name] for row in rows}) for name in ("gpu", "torch", "diffusers", "triton", "commit")}
    return "; ".join(f"{name} {', '.join(value for value in values if value)}" for name, values in found.items())


def _group(row: Row) -> str:
    side = row["resolution"].partition("x")[0]
    how = row["mode"] + (", not compiled" if (row["mode"], row["compile"]) == ("graph", "none") else "")
    return f"{row['model']} {side}² {row['dtype']}, batch {row['batch']}, {how}"


def label_of(row: Row) -> str:
    """The preset, as it was where its settings have changed since; and the paper's softmax in place of the hard
    assignment that `toma` has had since."""
    settings = json.loads(row["settings"])
    label = f"`{row['method']}`"
    if row["method"] == "toma" and settings.get("scale") != "inf":
        return label + ", `scale=1000`"
    if row["method"] in ("toma-stage", "toma-late") and (
        row["file"] in OLDER or "share" in settings or settings.get("share_plan")
    ):
        return label + " as it was"
    return label + (", `skip_blocks=()`" if settings.get("skip_blocks") == [] else "")


def newest(group: dict[str, str]) -> dict[tuple[str, str], Row]:
    """Of every setting and ratio the row of that group that was measured last."""
    rows = [row for name in ("denoiser_h200.csv", "methods_h200.csv", PRESETS_NOW) for row in read(name)]
    found = [row for row in rows if row["ratio"] and not row["cache"] and group.items() <= row.items()]
    return {(label_of(row), row["ratio"]): row for row in sorted(found, key=lambda row: row["date"])}


def _is_bound_of_local(row: Row) -> bool:
    """The paper's lower bound is of local regions; that of a global assignment belongs to `toma` alone."""
    return row["method"] != "lower-bound" or row["assign"] == "local"
