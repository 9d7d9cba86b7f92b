"""Write the tables of the README and docs/ anew from the rows in benchmarks/results/. A test holds the pages to them.

A page says where a table stands, and this file what is in it, one function a name:

    <!-- rows: headline -->
    <!-- end -->
"""

import csv
import json
import math
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from toma_diffusion.config.toma import SHARES
from toma_diffusion.evaluation import Variant

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    *("presets_h200.csv", "reuse_h200.csv", "today_h200.csv", "video_h200.csv"),
    *("denoiser_h200.csv", "methods_h200.csv", "merge_h200.csv", "ops_h200.csv"),
)
PRESETS_NOW = "presets_h200.csv"
"""Where the presets are timed as they are now. `toma-stage` and `toma-late` of older files are older."""
REUSE = "reuse_h200.csv"
RATIOS = ("0.25", "0.5", "0.75")
HEADLINE_MODELS = {
    "SDXL": {"model": "sdxl", "resolution": "1024x1024", "mode": "graph", "compile": "block", "steps": "10"},
    "Flux.1-dev": {"model": "flux", "resolution": "1024x1024", "mode": "compiled", "compile": "block", "steps": "4"},
}
"""Models in the README's table. One group of rows each, so that all speed-ups of a column have the same baseline."""
HEADLINE_OTHERS = {
    "`balanced` (default)": "balanced",
    "`fast`": "fast",
    "`faster`": "faster",
    "14 of 20 steps": "14 steps",
    "10 of 20 steps": "10 steps",
    "8 of 20 steps": "8 steps",
    "DeepCache, every second step": "deepcache, interval=2",
    "DeepCache, two of three steps": "deepcache, interval=3",
    "FirstBlockCache, 0.1": "first-block-cache, threshold=0.1",
    "FirstBlockCache, 0.2": "first-block-cache, threshold=0.2",
    "TaylorSeer, every second step": "taylorseer, cache_interval=2, use_lite_mode=True",
}
"""Rows of the README's table that merge no tokens, by the titles of their quality rows: the default first."""
HEADLINE_SETTINGS = {
    "`toma-late`": "0.5",
    "`toma-stage`": "0.5",
    "`toma-once`": "0.5",
    "`toma-tile`": "0.5",
    "`toma`": "0.5",
    "`toma`, `scale=1000`": "0.5",
    "`tomesd`": "0.5",
    "`tofu`": "0.5",
    "`todo`": "0.75",
}
"""Those that merge, with the fraction that is removed."""
HEADLINE_STEPS = "20"
HEADLINE_CHANGES = ("", "scale=1000.0", "skip_blocks=[]")
JUDGES = ("bundled", "flux")
"""The demo models whose images are compared."""
COUNTED, COMPUTED = "†", "‡"
"""Mark a gain that was counted in multiplications, not timed; and one that was computed from the share of skipped steps
and their measured cost."""
LARGER_MODELS = {
    "flux2": "FLUX.2-dev",
    "flux2-klein": "FLUX.2-klein 9B",
    "wan-480p": "Wan 14B",
    "wan": "Wan 14B",
}
"""Models after Flux.1 in the README's second table."""
PRESETS_OF_REUSE = ("balanced", "fast", "faster")
REUSE_SHOWN = (
    *PRESETS_OF_REUSE,
    *("reuse, period=2, part=deep, start=0.4", "reuse, period=3, part=deep, order=0", "reuse, period=2, order=1"),
)
"""What is reused in the table of equal time."""
AS_IT_WAS = "num_regions=64; distance_weight=0.0; guidance_parts=1; share=plan; skip_blocks=[]"
"""How the changes of `toma-stage` as it was begin: `BEFORE` in quality.py."""
NOMINAL_GAINS = (1.15, 1.25, 1.33, 1.43, 1.67, 2.0, 2.5)
"""Lines of fewer steps in the table of equal time. A number of steps belongs to the nearest."""
EQUAL_TIME_METHODS = {"toma-late": "0.5", "toma-stage": "0.5", "tomesd": "0.5", "tofu": "0.5", "todo": "0.75"}
"""What is compared with fewer steps: every method at the ratio that was timed."""
CONDITIONS = {
    "20 steps": ("bundled", "20"),
    "4 steps": ("bundled", "4"),
    "4-step model": ("4step", "4"),
}
"""Where settings are compared: the file of the rows, and the steps."""
CONDITIONS_OF = {
    "rotation": {"20 steps": ("rotation", "20"), "4 steps": ("rotation", "4")},
    **{part: {"20 steps": ("video", "20")} for part in ("boxes", "nearness", "whole blocks")},
}
"""Of parts with rows of their own: by a commit that still had the setting, or of clips."""
COMPARED_BY = {
    "sharing": "share",
    "regions": "selection",
    "distances": "distance_weight",
    "guidance": "guidance_parts",
    "attention": "ratio",
    "rotation": "rotation",
    "boxes": "region_tokens",
}
"""The setting whose values are the columns; a part that is not named has the conditions as columns."""
NOT_YET = ("quality_video.csv",)
"""Files that may not be there yet. Their tables are empty until then."""
CLIP_RUNS = ("steps", "presets", "reuse", "together", "caches")
"""Parts in the table of clips. Regions have one of their own."""
SIZES_OF_CLIPS = ("resolution", "frames", "blocks")
"""Columns that are the same in all rows of clips."""
USUAL_CHANGES = ("skip_blocks=[]", "ratio=0.25", "ratio=0.5")
"""What rows of clips have in common, or say in another way."""
LEFT_OUT = ("scope=block", "method=toma-once")
"""Rows of a comparison that say the same once more."""
NOTES = {"`toma`, `scale=1000`": "the paper's softmax"}
CACHES = {
    "deepcache": "DeepCache",
    "first-block-cache": "FirstBlockCache",
    "taylorseer": "TaylorSeer",
    "magcache": "MagCache",
}
MISSING = "—"
"""Where there is no row for a cell."""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return [row | {"file": name} for row in csv.DictReader(file)]


def headline_table() -> str:
    """A few settings: the speed-up of a denoiser, and how near the demo models' images stay."""
    lines = _head(
        " | ".join(
            ["", *(f"{name}, speed-up" for name in HEADLINE_MODELS), "LPIPS", "PSNR, dB", "LPIPS, Flux-class model"]
        )
    )
    unet, flux = ([row for row in read(f"quality_{name}.csv") if row["steps"] == HEADLINE_STEPS] for name in JUDGES)
    for label, title in HEADLINE_OTHERS.items():
        near, of_flux = ({row["title"]: row for row in rows}.get(title) for rows in (unet, flux))
        timed = [_timed_preset(title, group) for group in HEADLINE_MODELS.values()]
        gains = [_speed_up(row) if row else _gain(other) for row, other in zip(timed, (near, of_flux), strict=True)]
        lines.append("| " + " | ".join([label, *gains, *_nearness(near, of_flux)]) + " |")
    speed = {name: _newest(group) for name, group in HEADLINE_MODELS.items()}
    for label, ratio in HEADLINE_SETTINGS.items():
        speeds = [speed[name].get((label, ratio)) for name in HEADLINE_MODELS]
        near, of_flux = (
            {
                (_label_of_quality(row), row["ratio"]): row
                for row in rows
                if row["run"] == "presets" and row["changed"] in HEADLINE_CHANGES
            }.get((label, ratio))
            for rows in (unet, flux)
        )
        note = f" ({NOTES[label]})" if label in NOTES else ""
        cells = [
            f"{label}{note}, {float(ratio):.0%} of the tokens removed",
            *(MISSING if row is None else _speed_up(row) for row in speeds),
            *_nearness(near, of_flux),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _timed_preset(name: str, group: dict[str, str]) -> Row | None:
    """The row of a preset that reuses, in a generation of as many steps as the table's; None of anything else."""
    wanted = group | {"steps": HEADLINE_STEPS, "method": name}
    return next((row for row in read(REUSE) if name in PRESETS_OF_REUSE and wanted.items() <= row.items()), None)


def _speed_up(row: Row) -> str:
    return f"**{float(row['speedup']):.2f}×**"


def _gain(row: Row | None) -> str:
    """The gain in time; with a mark where it was counted or computed, not timed."""
    if row is None or not row["gain"]:
        return MISSING
    gain = f"{float(row['gain']):.2f}×"
    if "multiplications" in row["gain_source"]:
        return f"{gain} {COUNTED}"
    return f"{gain} {COMPUTED}" if row["skipped"] else f"**{gain}**"


def _nearness(unet: Row | None, flux: Row | None) -> list[str]:
    """LPIPS and PSNR on the demo model, LPIPS on the Flux-class one."""
    found = [MISSING if unet is None else _figure(unet[name], digits) for name, digits in (("lpips", 3), ("psnr", 1))]
    return [*found, MISSING if flux is None else _figure(flux["lpips"], 3)]


def headline_facts() -> str:
    """What the speed-ups of the README's table were measured on, and against what."""
    used = {
        name: [row for key, row in _newest(group).items() if key[1] == HEADLINE_SETTINGS.get(key[0])]
        for name, group in HEADLINE_MODELS.items()
    }
    rows = [row for found in used.values() for row in found]
    timed = [_timed_preset(name, group) for name in PRESETS_OF_REUSE for group in HEADLINE_MODELS.values()]
    rows += [row for row in timed if row]
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


def presets_table() -> str:
    """The presets as they are now, and `toma-stage` as it was."""
    lines = _head("model | method | scope | removed | ms a step | baseline | speed-up | memory")
    for row in read(PRESETS_NOW):
        if row["ratio"]:
            memory = float(row["peak_mib"]) / float(row["baseline_peak_mib"]) - 1
            lines.append(
                f"| {_group(row)} | {_label(row)} | {row['scope']} | {row['ratio']} | {float(row['step_ms']):.2f} "
                f"| {float(row['baseline_ms']):.2f} | **{float(row['speedup']):.2f}×** | {memory:+.1%} |"
            )
    return "\n".join(lines)


def timed_table(name: str) -> str:
    """All rows of a file, each with its baseline: `reuse` is reuse_h200.csv. Of a setting that was timed again, the
    last."""
    rows = [row for row in read(f"{name}_h200.csv") if row["ratio"]]
    newest = {(f"{row['model']}, {_size(row)}", row["steps"], _setting(row), row["ratio"]): row for row in rows}
    lines = _head("model | steps | method | removed | ms a step | baseline | speed-up | memory")
    for (model, steps, setting, ratio), row in newest.items():
        peak, before = float(row["peak_mib"]), float(row["baseline_peak_mib"])
        merges = float(ratio) > 0 and not _only_reuses(row)
        lines.append(
            f"| {model} | {steps} | {setting} | {f'{float(ratio):.0%}' if merges else ''} "
            f"| {_milliseconds(row['step_ms'])} | {_milliseconds(row['baseline_ms'])} | {_speed_up(row)} "
            f"| {peak / before - 1:+.1%} |"
        )
    return "\n".join(lines)


def larger_table() -> str:
    """Merging alone on models after Flux.1, in the README."""
    lines = _head("`toma-stage`, speed-up | 50% of the tokens removed | 75%")
    rows = [row for name in ("today", "video") for row in read(f"{name}_h200.csv") if _setting(row) == "`toma-stage`"]
    for model, name in LARGER_MODELS.items():
        found = {row["ratio"]: row for row in rows if row["model"] == model}
        cells = [_speed_up(found[ratio]) if ratio in found else MISSING for ratio in ("0.5", "0.75")]
        lines.append("| " + " | ".join([f"{name}, {_size(found['0.5'])}", *cells]) + " |")
    return "\n".join(lines)


def _size(row: Row) -> str:
    width, _, height = row["resolution"].partition("x")
    size = f"{width}²" if width == height else f"{width}×{height}"
    return f"{size}, {row['frames']} frames" if row["frames"] else size


def _setting(row: Row) -> str:
    """A preset or method, and what was changed of it."""
    settings = json.loads(row["settings"])
    label = f"`{row['method']}`"
    if "reuse" in settings and row["method"] not in PRESETS_OF_REUSE:
        label += ", every second step reused" if not settings["reuse"] else f", `{settings['reuse']}`"
    return label + (", within frames" if settings.get("region_frames") == 1 else "")


def _only_reuses(row: Row) -> bool:
    """Whether a preset that merges at few steps had too many for it."""
    return int(row["steps"]) > json.loads(row["settings"]).get("max_steps", math.inf)


def _milliseconds(value: str) -> str:
    return f"{float(value):.4g}" if float(value) < 1000 else f"{float(value):,.0f}"


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


def front_table(model: str) -> str:
    """Fewer steps, presets and caches at all numbers of steps: gain in time, and LPIPS."""
    rows = read(f"quality_{model}.csv")
    steps = sorted({row["steps"] for row in rows}, key=int)
    lines = _head(" | ".join(["", "gain", *(f"LPIPS, {number} steps" for number in steps)]))
    fewer: dict[float, dict[str, str]] = {gain: {} for gain in NOMINAL_GAINS}
    for row in rows:
        if row["run"] == "steps":
            nearest = min(NOMINAL_GAINS, key=lambda gain: abs(gain - float(row["gain"])))
            fewer[nearest][row["steps"]] = f"{_figure(row['lpips'], 3)} ({_point(row)})"
    for gain, found_by_steps in fewer.items():
        if found_by_steps:
            cells = [found_by_steps.get(each, "") for each in steps]
            lines.append("| " + " | ".join(["fewer steps", f"about {gain:.2f}×", *cells]) + " |")
    reused = [row for row in rows if row["run"] == "reuse" and row["title"] in REUSE_SHOWN]
    shown = [*reused, *(row for row in rows if row["run"] == "caches" or _is_compared(row))]
    order = {_named(row): (["reuse", "presets", "combined", "caches"].index(row["run"]), _place(row)) for row in shown}
    for title in sorted(order, key=lambda each: (order[each], each)):
        found = {row["steps"]: row for row in shown if _named(row) == title}
        gains = sorted({f"{float(row['gain']):.2f}×" for row in found.values() if row["gain"]})
        gains = [gains[0], gains[-1]] if len(gains) > 2 else gains
        mark = f" {COUNTED}" if any("multiplications" in row["gain_source"] for row in found.values()) else ""
        cells = [_figure(found[each]["lpips"], 3) + _left_over(found[each]) if each in found else "" for each in steps]
        lines.append("| " + " | ".join([title, (" to ".join(gains) or MISSING) + mark, *cells]) + " |")
    return "\n".join(lines)


def clips_table(model: str) -> str:
    """Fewer steps, presets, reuse and caches on a model of clips, in the order of their gain at 20 steps."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] in CLIP_RUNS]
    steps = sorted({row["steps"] for row in rows}, key=int)
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_named_clip(row), {})[row["steps"]] = row
    lines = _head(" | ".join(["", *(f"{number} steps: gain, LPIPS, flicker" for number in steps)]))
    for title in sorted(found, key=lambda each: float(found[each].get(HEADLINE_STEPS, {}).get("gain") or "inf")):
        cells = [_cell_of_clips(found[title].get(number)) for number in steps]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def frames_table(model: str) -> str:
    """Regions inside a frame and over several, at all ratios."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] == "frames"]
    steps = sorted({row["steps"] for row in rows}, key=int)
    lines = _head(" | ".join(["regions", "removed", *(f"{number} steps: gain, LPIPS, flicker" for number in steps)]))
    found = {(row["ratio"], int(row["region_frames"]), row["steps"]): row for row in rows}
    for ratio, frames in sorted({key[:2] for key in found}):
        title = "inside a frame" if frames == 1 else f"over {frames} frames"
        cells = [_cell_of_clips(found.get((ratio, frames, number))) for number in steps]
        lines.append("| " + " | ".join([title, f"{float(ratio):.0%}", *cells]) + " |")
    return "\n".join(lines)


def _named_clip(row: Row) -> str:
    """A row of the table of clips: what it is at all numbers of steps."""
    if row["run"] == "steps":
        nearest = min(NOMINAL_GAINS, key=lambda gain: abs(gain - float(row["gain"])))
        return f"fewer steps, about {nearest:.2f}×"
    if row["run"] == "caches":
        return _named(row)
    changes = [f"`{each}`" for each in row["changed"].split("; ") if each and each not in USUAL_CHANGES]
    removed = [f"{float(row['ratio']):.0%} removed"] if row["run"] != "reuse" else []
    return ", ".join([f"`{row['method']}`", *removed, *changes])


def _cell_of_clips(row: Row | None) -> str:
    if row is None:
        return ""
    steps = f" ({_point(row)})" if row["run"] == "steps" else ""
    return f"{_gain(row)}, {_figure(row['lpips'], 3)}, {_figure(row['flicker'], 2)}{steps}"


def about_clips(model: str) -> str:
    """What the tables of clips show, with the plot: as generated as they are, since there may be no rows yet."""
    (size,), (frames,), (blocks,) = ({row[name] for row in read(f"quality_{model}.csv")} for name in SIZES_OF_CLIPS)
    return f"""## Quality of a small model

![Gain in time against LPIPS, clips of a small model](front_{model}.svg)

Clips of {frames} frames of {size.replace("x", "×")} pixels, of a small model of {blocks} blocks, compared with those
that it makes as it is. All its blocks are merged, unless `skip_blocks` says otherwise. LPIPS is the mean over all
frames, [flicker](evaluation.md) how much the changes from frame to frame differ. Gains are those of a large model at
the same settings, computed from its measured steps, as on the page about [quality](quality.md): {MISSING} where a step
has not been measured, {COMPUTED} by the share of the steps that were skipped or reused.

The tables: regions inside a frame and over several frames; `toma-stage` with half of the tokens removed, by the shape
of its regions, by how much near tokens are preferred in regions of 256 tokens, and by the blocks that are left whole;
and all methods, in the order of their gain at {HEADLINE_STEPS} steps."""


def reuse_table(model: str) -> str:
    """All that reuses over time: the share of the steps, the gain in time, and LPIPS."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] == "reuse"]
    steps = [each for each in ("20", "8", "4") if any(row["steps"] == each for row in rows)]
    lines = _head(" | ".join(["", *(f"{each} steps: reused, gain, LPIPS" for each in steps)]))
    titles = {row["title"] for row in rows}
    presets = [title for title in PRESETS_OF_REUSE if title in titles]
    for title in [*presets, *sorted(titles - set(presets))]:
        found = {row["steps"]: row for row in rows if row["title"] == title}
        cells = [
            f"{float(row['skipped'] or 0):.0%}, {_gain(row)}, {_figure(row['lpips'], 4)}" if row else ""
            for row in (found.get(each) for each in steps)
        ]
        lines.append("| " + " | ".join([f"`{title}`", *cells]) + " |")
    return "\n".join(lines)


def presets_quality_table(model: str) -> str:
    """LPIPS of all presets at all ratios, with few and with many steps."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] == "presets"]
    steps = [number for number in ("20", "4") if any(row["steps"] == number for row in rows)]
    columns = [(number, ratio) for number in steps for ratio in RATIOS]
    lines = _head(" | ".join(["LPIPS", *(f"{number} steps, {float(ratio):.0%}" for number, ratio in columns)]))
    labels = {_label_of_quality(row): (_place(row), row["changed"]) for row in rows}
    for label in sorted(labels, key=lambda each: labels[each]):
        found = {(row["steps"], row["ratio"]): row["lpips"] for row in rows if _label_of_quality(row) == label}
        cells = [_figure(found.get(column, ""), 3) for column in columns]
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(lines)


def settings_table(part: str) -> str:
    """LPIPS by the values of one setting, wherever it was measured."""
    by = COMPARED_BY.get(part)
    conditions = CONDITIONS_OF.get(part, CONDITIONS)
    found: dict[tuple[str, str], dict[str, str]] = {}
    every = {model: read(f"quality_{model}.csv") for model, _ in conditions.values()}
    for name, (model, steps) in conditions.items():
        rows = [row for row in every[model] if (row["run"], row["steps"]) == (part, steps)]
        rows = [row for row in rows if not {*row["changed"].split("; "), f"method={row['method']}"} & {*LEFT_OUT}]
        common = _common_changes(rows) if rows else []
        for row in rows:
            parts = [each for each in row["changed"].split("; ") if each not in common]
            value = next((each.partition("=")[2] for each in parts if by and each.partition("=")[0] == by), "")
            value = value or (row[by] if by else name)
            title = ", ".join(f"`{each}`" for each in parts if each.partition("=")[0] != by)
            if by != "ratio" and len({each["ratio"] for each in rows}) > 1:
                title += f", {float(row['ratio']):.0%} removed"
            found.setdefault((title, name if by else ""), {})[value] = _figure(row["lpips"], 3)
    if not found:
        raise ValueError(f"there are no rows of {part}.")
    columns = sorted({value for cells in found.values() for value in cells}, key=_in_order) if by else [*conditions]
    titles = [f"`{by}={value}`" for value in columns] if by else [f"LPIPS, {name}" for name in columns]
    lines = _head(" | ".join([*(["LPIPS"] if by else []), "", *titles]))
    places = {name: place for place, name in enumerate(["", *conditions])}
    for title, name in sorted(found, key=lambda key: (places[key[1]], _in_order(key[0]))):
        cells = [found[title, name].get(value, MISSING) for value in columns]
        lines.append("| " + " | ".join([*([name] if by else []), title, *cells]) + " |")
    return "\n".join(lines)


def quality_facts(model: str) -> str:
    """What the rows of a demo model were measured on, and for which large model its gains were computed."""
    rows = read(f"quality_{model}.csv")

    def of(name: str) -> str:
        return ", ".join(sorted({row[name] for row in rows if row[name]}))

    return (
        f"{of('images')} prompts, guidance {of('guidance') or 'of the pipeline'}, {of('dtype')}, {of('gpu')}, "
        f"torch {of('torch')}, diffusers {of('diffusers')}, commits {of('commit')}. "
        f"Gains are those of {' or of '.join(sorted({row['gain_source'] for row in rows if row['gain_source']}))}."
    )


def facts() -> str:
    """The machine, the versions and the commits of all rows."""
    rows = [row for name in FILES for row in read(name)]
    found = {name: sorted({row[name] for row in rows}) for name in ("gpu", "torch", "diffusers", "triton", "commit")}
    return "; ".join(f"{name} {', '.join(value for value in values if value)}" for name, values in found.items())


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline_table,
    "headline facts": headline_facts,
    "larger": larger_table,
    "explain": explain_table,
    "presets": presets_table,
    "denoiser": denoiser_table,
    "pipeline": pipeline_table,
    "cache": cache_table,
    "methods": methods_table,
    "merging": merging_table,
    "operators": operator_table,
    "facts": facts,
}
"""What a page may name, besides those of a file of quality rows, such as quality_bundled.csv: `equal time on bundled`,
`presets on bundled`, `reuse on bundled`, `quality facts of bundled`; of clips `clips on video`, `frames on video` and
`about clips on video`; and `settings: sharing`, a part of quality.py."""
TABLES_OF_ROWS: dict[str, Callable[[str], str]] = {
    "timed: ": timed_table,
    "quality facts of ": quality_facts,
    "equal time on ": front_table,
    "reuse on ": reuse_table,
    "presets on ": presets_quality_table,
    "settings: ": settings_table,
    "clips on ": clips_table,
    "frames on ": frames_table,
    "about clips on ": about_clips,
}
"""Those of a file of rows, or of a part, by how their names begin."""


def rewritten(page: str) -> str:
    """The page with the tables of today."""
    if page.count("<!-- rows: ") != page.count("<!-- end -->"):
        raise ValueError("every `<!-- rows: NAME -->` needs its `<!-- end -->`, and the other way round.")
    return re.sub(r"(<!-- rows: (.*?) -->\n)(.*?)(<!-- end -->)", _filled_in, page, flags=re.DOTALL)


def _filled_in(marked: re.Match[str]) -> str:
    try:
        return f"{marked[1]}{_table(marked[2])}\n{marked[4]}"
    except FileNotFoundError as error:
        if Path(error.filename).name not in NOT_YET:
            raise
        return f"{marked[1]}{marked[4]}"


def _table(name: str) -> str:
    for beginning, table in TABLES_OF_ROWS.items():
        if name.startswith(beginning):
            return table(name.removeprefix(beginning))
    if name not in TABLES:
        raise ValueError(f"`<!-- rows: {name} -->` names no table; use one of {', '.join(TABLES)}.")
    return TABLES[name]()


def _head(columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {columns} |".replace("|  |", "| |"), "|" + "---|" * (columns.count("|") + 1)]


def _group(row: Row) -> str:
    side = row["resolution"].partition("x")[0]
    how = row["mode"] + (", not compiled" if (row["mode"], row["compile"]) == ("graph", "none") else "")
    return f"{row['model']} {side}² {row['dtype']}, batch {row['batch']}, {how}"


def _label(row: Row) -> str:
    """The preset, as it was where its settings have changed since; and the paper's softmax in place of the hard
    assignment that `toma` has had since."""
    settings = json.loads(row["settings"])
    label = f"`{row['method']}`"
    if row["method"] == "toma" and settings.get("scale") != "inf":
        return label + ", `scale=1000`"
    if row["method"] in ("toma-stage", "toma-late") and (row["file"] != PRESETS_NOW or "share" in settings):
        return label + " as it was"
    return label + (", `skip_blocks=()`" if settings.get("skip_blocks") == [] else "")


def _label_of_quality(row: Row) -> str:
    """The same, of a row of quality_bundled.csv."""
    if row["changed"].startswith(AS_IT_WAS):
        return f"`{row['method']}` as it was"
    return f"`{row['method']}`" + (", `scale=1000`" if row["changed"] == "scale=1000.0" else "")


def _newest(group: dict[str, str]) -> dict[tuple[str, str], Row]:
    """Of every setting and ratio the row of that group that was measured last."""
    rows = [row for name in ("denoiser_h200.csv", "methods_h200.csv", PRESETS_NOW) for row in read(name)]
    found = [row for row in rows if row["ratio"] and not row["cache"] and group.items() <= row.items()]
    return {(_label(row), row["ratio"]): row for row in sorted(found, key=lambda row: row["date"])}


def _place(row: Row) -> int:
    """Of a method in a table: ours first, then those of the paper, then others."""
    order = (
        "balanced",
        "fast",
        "faster",
        "toma-late",
        "toma-stage",
        "toma-once",
        "toma-tile",
        "toma-stripe",
        "toma",
        "tomesd",
        "tofu",
        "todo",
    )
    method = row["method"].partition("+")[0]
    return order.index(method) if method in order else len(order)


def _is_compared(row: Row) -> bool:
    """Whether it is a preset, alone or with fewer steps, at the ratio that was timed."""
    is_alone = row["run"] == "presets" and not row["changed"]
    is_with_steps = row["run"] == "combined" and row["shortcuts"].startswith("steps:")
    return (is_alone or is_with_steps) and EQUAL_TIME_METHODS.get(row["method"].partition("+")[0]) == row["ratio"]


def _left_over(row: Row) -> str:
    """The number of steps that a row with fewer steps has, in parentheses."""
    return f" ({row['shortcuts'].removeprefix('steps:')})" if row["run"] == "combined" else ""


def _point(row: Row) -> str:
    """The number of steps, the ratio or the interval of a row."""
    return Variant.from_dict(json.loads(row["variant"])).point


def _named(row: Row) -> str:
    """A row of the table of equal time."""
    if row["run"] == "reuse":
        return f"`{row['title']}`"
    if row["run"] == "caches":
        name, *settings = row["title"].split(", ")
        return ", ".join([CACHES.get(name, name), *(f"`{part}`" for part in settings)])
    if row["ratio"]:
        method, plus, _ = row["method"].partition("+")
        return f"`{method}`, {float(row['ratio']):.0%} removed" + (", and fewer steps" if plus else "")
    return row["title"]


def _in_order(text: str) -> list[tuple[float, str]]:
    """To sort settings by their numbers, and what is shared from everything to nothing."""
    text = {name: str(place) for place, name in enumerate(SHARES)}.get(text, text)
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if part[:1].isdigit() else (-1.0, part) for part in parts]


def _is_bound_of_local(row: Row) -> bool:
    """The paper's lower bound is of local regions; that of a global assignment belongs to `toma` alone."""
    return row["method"] != "lower-bound" or row["assign"] == "local"


def _common_changes(rows: list[Row]) -> list[str]:
    """Fields that all rows of a table have changed in the same way."""
    first, *others = [row["changed"].split("; ") for row in rows]
    return [part for part in first if others and part and all(part in other for other in others)]


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
