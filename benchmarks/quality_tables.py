"""Tables of quality: how near images and clips stay, at which gain in time."""

import re
from collections.abc import Callable

from table_rows import (
    COMPUTED_STEPS,
    MISSING,
    RATIOS,
    SKIPPING,
    USUAL_STEPS,
    Row,
    figure,
    gain_of,
    head,
    label_of_quality,
    point_of,
    read,
    read_equal_cost,
    setting_of,
)

NOMINAL_GAINS = (1.15, 1.25, 1.33, 1.43, 1.67, 2.0, 2.5)
"""Lines of fewer steps in the table of equal time. A number of steps belongs to the nearest."""
EQUAL_TIME_METHODS = {"toma-late": "0.5", "toma-stage": "0.5", "tomesd": "0.5", "tofu": "0.5", "todo": "0.75"}
"""What is compared with fewer steps: every method at the ratio that was timed."""
CONDITIONS = {
    "50 steps": ("bundled", "50"),
    "20 steps": ("bundled", "20"),
    "8 steps": ("bundled", "8"),
    "4 steps": ("bundled", "4"),
    "4-step model": ("4step", "4"),
}
"""Where settings are compared: the file of the rows, and the steps."""
CONDITIONS_OF = {
    "rotation": {"20 steps": ("rotation", "20"), "4 steps": ("rotation", "4")},
}
"""Of parts with rows of their own, by a commit that still had the setting."""
COMPARED_BY = {
    "sharing": "share",
    "regions": "selection",
    "distances": "distance_weight",
    "guidance": "guidance_parts",
    "attention": "ratio",
    "rotation": "rotation",
}
"""The setting whose values are the columns; a part that is not named has the conditions as columns."""
FEWER = ("steps", "fewer steps")
"""Parts of even steps."""
EQUAL_COST_STEPS = ("4", "8", "20", "50")
"""Numbers of steps in the tables of equal cost, as far as a file has them."""
AS_MANY = 0.95
"""A cache is compared with a preset if it saves at least this part of the preset's gain."""
NETWORKS = {
    "bundled": "UNet",
    "flux": "Flux-class",
    "video": "video",
    "4step": "4-step UNet",
}
"""The demo networks, by the files of their rows."""
CLIP_RUNS = (*FEWER, "presets", "caches")
"""Parts in the table of clips. Regions have one of their own."""
USUAL_CHANGES = ("skip_blocks=[]", "ratio=0.25", "ratio=0.5")
"""What rows of clips have in common, or say in another way."""
LEFT_OUT = ("scope=block", "method=toma-once")
"""Rows of a comparison that say the same once more."""
SHARED = ("plan", "destinations", "nothing")
"""What runs of blocks share, the most first."""
CACHES = {
    "deepcache": "DeepCache",
    "first-block-cache": "FirstBlockCache",
    "taylorseer": "TaylorSeer",
    "magcache": "MagCache",
    "seacache": "SeaCache",
    "cache-dit": "Cache-DiT",
}
SOLVERS = {"dpmpp-2m": "DPM++ 2M", "unipc": "UniPC"}


def equal_cost_table(model: str) -> str:
    """What is as cheap as the presets: LPIPS to the picture of all steps."""
    return _equal_cost(model, "lpips")


def converged_table(model: str) -> str:
    """The same rows, compared with the picture of 100 steps."""
    return _equal_cost(model, "lpips_converged")


def equal_cost_summary() -> str:
    """All networks that have been measured, at 20 steps (or at the only number of steps of a model): for the README."""
    lines = []
    for model, name in NETWORKS.items():
        try:
            rows = read_equal_cost(model)
        except FileNotFoundError:
            continue
        for count, preset in _costs(rows, USUAL_STEPS):
            cells = _equal_cost_cells(rows, USUAL_STEPS, count, preset, "lpips")
            lines.append([f"{name}, {preset}", *cells])
    if not lines:
        raise FileNotFoundError(2, "no rows", "quality_bundled_cpu.csv")
    return _measured(["20 steps, LPIPS", *EQUAL_COST_COLUMNS], lines)


EQUAL_COST_COLUMNS = (
    "computed",
    "gain",
    "even steps",
    "best solver",
    "best cache",
    "list alone",
    "prediction",
    "learned",
)


def _equal_cost(model: str, distance: str) -> str:
    rows = read_equal_cost(model)
    lines = []
    for steps in EQUAL_COST_STEPS:
        for count, preset in _costs(rows, steps):
            lines.append([steps, preset, *_equal_cost_cells(rows, steps, count, preset, distance)])
    return _measured(["steps", "preset", *EQUAL_COST_COLUMNS], lines)


def _measured(headings: list[str], lines: list[list[str]]) -> str:
    """A table without columns in which nothing was measured."""
    columns = [each for each in zip(headings, *lines, strict=True) if any(cell != MISSING for cell in each[1:])]
    if {each[0] for each in columns}.isdisjoint(EQUAL_COST_COLUMNS[2:]):
        return "Not measured yet."
    heading, *rest = zip(*columns, strict=True)
    return "\n".join([*head(" | ".join(heading)), *("| " + " | ".join(cells) + " |" for cells in rest)])


def _costs(rows: list[Row], steps: str) -> list[tuple[int, str]]:
    """Numbers of computed steps that were measured, the largest first, and the presets that have them."""
    here = [row for row in rows if row["steps"] == steps and row["run"] in ("skip", "lists", "solvers")]
    counts: dict[int, list[str]] = {}
    for row in here:
        if row["gain_source"] == COMPUTED_STEPS:  # `balanced` merges tokens at 4 steps
            names = counts.setdefault(_computed(row), [])
            names += [row["method"]] if row["method"] in SKIPPING and row["method"] not in names else []
    return [(count, ", ".join(f"`{name}`" for name in counts[count])) for count in sorted(counts, reverse=True)]


def _equal_cost_cells(rows: list[Row], steps: str, count: int, presets: str, distance: str) -> list[str]:
    """In the order of the columns; a dash where nothing was measured."""
    here = [row for row in rows if row["steps"] == steps and row[distance]]
    same = [row for row in here if row["gain_source"] == COMPUTED_STEPS and _computed(row) == count]
    gain = int(steps) / count
    cheap = [row for row in here if row["run"] == "caches" and float(row["gain"]) >= AS_MANY * gain]

    def of(run: str, *, learned: bool = False) -> list[Row]:
        return [row for row in same if row["run"] == run and ("learned" in row["changed"].split("; ")) == learned]

    return [
        f"{count} of {steps}",
        f"{gain:.2f}×",
        _nearest(of("steps") + of("fewer steps"), distance),
        _nearest(of("solvers"), distance, lambda row: _solver(row)),
        _nearest(cheap, distance, lambda row: f"{CACHES[row['method']]}, {float(row['gain']):.2f}×"),
        _nearest(of("lists"), distance),
        _nearest(of("skip"), distance),
        _nearest(of("skip", learned=True), distance),
    ]


def _nearest(rows: list[Row], distance: str, note: Callable[[Row], str] | None = None) -> str:
    """The smallest distance, with a note about its row."""
    if not rows:
        return MISSING
    row = min(rows, key=lambda each: float(each[distance]))
    return figure(row[distance], 4) + (f" ({note(row)})" if note else "")


def _solver(row: Row) -> str:
    """The solver of a row, and its spacing if it is not the usual one."""
    name, *settings = row["title"].split(", ", 1)
    spacing = "".join(settings)
    own = " on our list" if "(" in spacing else ", Align Your Steps" if spacing.endswith("ays") else ""
    return SOLVERS[name] + own


def _computed(row: Row) -> int:
    return round(float(row["computed"])) if row["computed"] else round(int(row["steps"]) / float(row["gain"]))


def equal_cost_facts(model: str) -> str:
    """What the rows of skipped steps of a demo model were measured on."""
    return facts_of([row for row in read_equal_cost(model) if row["run"] in ("skip", "lists", "solvers", *FEWER)])


def front_table(model: str) -> str:
    """Fewer steps, presets and caches at all numbers of steps: gain in time, and LPIPS."""
    rows = read(f"quality_{model}.csv")
    steps = sorted({row["steps"] for row in rows}, key=int)
    lines = head(" | ".join(["", "gain", *(f"LPIPS, {number} steps" for number in steps)]))
    fewer: dict[float, dict[str, str]] = {gain: {} for gain in NOMINAL_GAINS}
    for row in rows:
        if row["run"] in FEWER:
            nearest = min(NOMINAL_GAINS, key=lambda gain: abs(gain - float(row["gain"])))
            fewer[nearest][row["steps"]] = f"{figure(row['lpips'], 3)} ({point_of(row)})"
    for gain, found_by_steps in fewer.items():
        if found_by_steps:
            cells = [found_by_steps.get(each, "") for each in steps]
            lines.append("| " + " | ".join(["fewer steps", f"about {gain:.2f}×", *cells]) + " |")
    shown = [row for row in rows if row["run"] == "caches" or _is_compared(row)]
    order = {_named(row): (["presets", "combined", "caches"].index(row["run"]), _place(row)) for row in shown}
    for title in sorted(order, key=lambda each: (order[each], each)):
        found = {row["steps"]: row for row in shown if _named(row) == title}
        gains = sorted({f"{float(row['gain']):.2f}×" for row in found.values() if row["gain"]})
        gains = [gains[0], gains[-1]] if len(gains) > 2 else gains
        cells = [figure(found[each]["lpips"], 3) + _left_over(found[each]) if each in found else "" for each in steps]
        lines.append("| " + " | ".join([title, " to ".join(gains) or MISSING, *cells]) + " |")
    return "\n".join(lines)


def clips_table(model: str) -> str:
    """Fewer steps, presets and caches on a model of clips, in the order of their gain at 20 steps."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] in CLIP_RUNS]
    steps = sorted({row["steps"] for row in rows}, key=int)
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_named_clip(row), {})[row["steps"]] = row
    lines = head(" | ".join(["", *(f"{number} steps: gain, LPIPS, flicker" for number in steps)]))
    for title in sorted(found, key=lambda each: float(found[each].get(USUAL_STEPS, {}).get("gain") or "inf")):
        cells = [_cell_of_clips(found[title].get(number)) for number in steps]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return "\n".join(lines)


def frames_table(model: str) -> str:
    """Regions inside a frame and over several, at all ratios."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] == "frames"]
    steps = sorted({row["steps"] for row in rows}, key=int)
    lines = head(" | ".join(["regions", "removed", *(f"{number} steps: gain, LPIPS, flicker" for number in steps)]))
    found = {(row["ratio"], int(setting_of(row, "region_frames") or 4), row["steps"]): row for row in rows}
    for ratio, frames in sorted({key[:2] for key in found}):
        title = "inside a frame" if frames == 1 else f"over {frames} frames"
        cells = [_cell_of_clips(found.get((ratio, frames, number))) for number in steps]
        lines.append("| " + " | ".join([title, f"{float(ratio):.0%}", *cells]) + " |")
    return "\n".join(lines)


def _named_clip(row: Row) -> str:
    """A row of the table of clips: what it is at all numbers of steps."""
    if row["run"] in FEWER:
        nearest = min(NOMINAL_GAINS, key=lambda gain: abs(gain - float(row["gain"])))
        return f"fewer steps, about {nearest:.2f}×"
    if row["run"] == "caches":
        return _named(row)
    changes = [f"`{each}`" for each in row["changed"].split("; ") if each and each not in USUAL_CHANGES]
    return ", ".join([f"`{row['method']}`", f"{float(row['ratio']):.0%} removed", *changes])


def _cell_of_clips(row: Row | None) -> str:
    if row is None:
        return ""
    steps = f" ({point_of(row)})" if row["run"] in FEWER else ""
    return f"{gain_of(row)}, {figure(row['lpips'], 3)}, {figure(row['flicker'], 2)}{steps}"


def presets_quality_table(model: str) -> str:
    """LPIPS of all presets at all ratios, with few and with many steps."""
    rows = [row for row in read(f"quality_{model}.csv") if row["run"] == "presets"]
    steps = [number for number in ("20", "4") if any(row["steps"] == number for row in rows)]
    columns = [(number, ratio) for number in steps for ratio in RATIOS]
    lines = head(" | ".join(["LPIPS", *(f"{number} steps, {float(ratio):.0%}" for number, ratio in columns)]))
    labels = {label_of_quality(row): (_place(row), row["changed"]) for row in rows}
    for label in sorted(labels, key=lambda each: labels[each]):
        found = {(row["steps"], row["ratio"]): row["lpips"] for row in rows if label_of_quality(row) == label}
        cells = [figure(found.get(column, ""), 3) for column in columns]
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
            value = value or (setting_of(row, by) if by else name)
            title = ", ".join(f"`{each}`" for each in parts if each.partition("=")[0] != by)
            if by != "ratio" and len({each["ratio"] for each in rows}) > 1:
                title += f", {float(row['ratio']):.0%} removed"
            found.setdefault((title, name if by else ""), {})[value] = figure(row["lpips"], 3)
    if not found:
        raise ValueError(f"there are no rows of {part}.")
    columns = sorted({value for cells in found.values() for value in cells}, key=_in_order) if by else [*conditions]
    titles = [f"`{by}={value}`" for value in columns] if by else [f"LPIPS, {name}" for name in columns]
    lines = head(" | ".join([*(["LPIPS"] if by else []), "", *titles]))
    places = {name: place for place, name in enumerate(["", *conditions])}
    for title, name in sorted(found, key=lambda key: (places[key[1]], _in_order(key[0]))):
        cells = [found[title, name].get(value, MISSING) for value in columns]
        lines.append("| " + " | ".join([*([name] if by else []), title, *cells]) + " |")
    return "\n".join(lines)


def quality_facts(model: str) -> str:
    """What the rows of a demo model were measured on, and for which large model its gains were computed."""
    rows = read(f"quality_{model}.csv")
    models = sorted({row["gain_source"] for row in rows} - {"", COMPUTED_STEPS})
    return facts_of(rows) + (f" Gains of merging are those of {' or of '.join(models)}." if models else "")


def facts_of(rows: list[Row]) -> str:
    """What rows were measured on."""

    def of(name: str) -> str:
        return ", ".join(sorted({row[name] for row in rows if row[name]}))

    return (
        f"{of('images')} prompts, guidance {of('guidance') or 'of the pipeline'}, {of('dtype')}, {of('gpu')}, "
        f"torch {of('torch')}, diffusers {of('diffusers')}, commits {of('commit')}."
    )


def _place(row: Row) -> int:
    """Of a method in a table: ours first, then those of the paper, then others."""
    order = (
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


def _named(row: Row) -> str:
    """A row of the table of equal time."""
    if row["run"] == "caches":
        name, *settings = row["title"].split(", ")
        return ", ".join([CACHES.get(name, name), *(f"`{part}`" for part in settings)])
    if row["ratio"]:
        method, plus, _ = row["method"].partition("+")
        return f"`{method}`, {float(row['ratio']):.0%} removed" + (", and fewer steps" if plus else "")
    return row["title"]


def _in_order(text: str) -> list[tuple[float, str]]:
    """To sort settings by their numbers, and what is shared from everything to nothing."""
    text = {name: str(place) for place, name in enumerate(SHARED)}.get(text, text)
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(float(part), "") if part[:1].isdigit() else (-1.0, part) for part in parts]


def _common_changes(rows: list[Row]) -> list[str]:
    """Fields that all rows of a table have changed in the same way."""
    first, *others = [row["changed"].split("; ") for row in rows]
    return [part for part in first if others and part and all(part in other for other in others)]
