"""Draw gain in time against LPIPS, one line a method, from the rows of quality.py: the plots of docs/quality.md.

    python benchmarks/plot_quality.py [--rows benchmarks/results/quality_bundled.csv --output docs/front_bundled.svg]

Every number of steps is a panel. The file follows the reader's light or dark colours; a .png is for looking at it.
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from table_rows import AS_IT_WAS, SKIPPING, line_of, point_of, read_rows, setting_of
from toma_lab.report.front import Curves, Point, draw

ROOT = Path(__file__).parents[1]
MODELS = ("bundled", "4step", "flux", "video")
"""What the files of rows and of plots are named after."""
RUNS = ("skip", "lists", "solvers", "steps", "fewer steps", "presets", "caches", "frames")
"""The parts of quality.py that are shown: what a user would choose between. The last is of clips."""
LINE_OF_PRESETS = ", ".join(SKIPPING)
LEARNED = "learned"
SHOWN = (
    *(
        LINE_OF_PRESETS,
        f"{LINE_OF_PRESETS}, {LEARNED}",
        "some of the own timesteps",
        "dpmpp-2m",
        "unipc",
        "fewer steps",
    ),
    *("toma-late", "toma-stage", "deepcache", "first-block-cache"),
    *("taylorseer, use_lite_mode=True", "magcache", "tofu", "toma-stage within frames"),
)
"""Lines, as many as can be told apart. The other presets are slower or farther than these."""
PANELS, MOST_PANELS = (20, 8, 4, 50), 3
"""Numbers of steps that are shown, the first of them that a file has; and how many."""
INK, LIGHT, DARK = "#010203", "#1f2328", "#e6edf3"
"""A placeholder for the colour of text, and that colour on light and on dark pages."""
STYLE = f"<style>svg {{ color: {LIGHT} }} @media (prefers-color-scheme: dark) {{ svg {{ color: {DARK} }} }}</style>"
Row = dict[str, str]


def curves_of(rows: list[Row]) -> Curves:
    """Points by the title of their line. Rows without a gain, and images that did not change, are left out."""
    curves: dict[str, list[Point]] = {}
    for row in rows:
        if row["run"] in RUNS and row["gain"] and row["lpips"] and float(row["lpips"]):
            label = row["method"] if row["method"] in SKIPPING else point_of(row)
            curves.setdefault(_title(row), []).append(Point(float(row["gain"]), float(row["lpips"]), label))
    return curves


def _title(row: Row) -> str:
    """Of a line: the method, with its settings; our presets that skip steps are one line. How clips are merged is in
    the name of the part, and in the frames of a region."""
    if row["method"] in SKIPPING and row["changed"] in ("", LEARNED):
        return ", ".join(filter(None, (LINE_OF_PRESETS, row["changed"])))
    name, settings = line_of(row)
    if row["changed"].startswith(AS_IT_WAS):
        return f"{name} as it was"
    if row.get("frames") and row["ratio"]:
        if row["run"] == "frames":
            return f"{name} within frames" if setting_of(row, "region_frames") == "1" else f"{name} of other regions"
        return name
    return ", ".join(filter(None, (name, settings)))


def figure_of(rows: list[Row]) -> Figure:
    """A panel for every number of steps, and one legend."""
    found_steps = {int(row["steps"]) for row in rows}
    panels = [steps for steps in PANELS if steps in found_steps][:MOST_PANELS] or sorted(found_steps)
    rows = [row for row in rows if int(row["steps"]) in panels]
    drawn = curves_of(rows)
    titles = [title for title in SHOWN if title in drawn]
    figure = Figure(figsize=(3.6 * len(panels) + 2.2, 3.9), layout="constrained")
    figure.patch.set_alpha(0)
    axes: Any = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, steps in zip(axes, panels, strict=True):
        found = curves_of([row for row in rows if int(row["steps"]) == steps])
        axis.patch.set_alpha(0)
        draw(axis, {title: found.get(title, ()) for title in titles}, INK)
        axis.set_title(f"{steps} steps")
        axis.label_outer()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


def write(figure: Figure, path: Path) -> None:
    """As SVG in the colours of the page, or as a picture in those of a light one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        figure.savefig(path, dpi=110, facecolor="white")
        return
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    head, svg, rest = path.read_text(encoding="utf-8").partition("<svg")
    opening, bracket, content = rest.replace(INK, "currentColor").partition(">")
    path.write_text(head + svg + opening + bracket + STYLE + content, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="default: those of every model that has any")
    parser.add_argument("--output", type=Path, help="with --rows: a .svg or .png file")
    options = parser.parse_args()
    jobs = [(options.rows, options.output or options.rows.with_suffix(".svg"))] if options.rows else []
    if not jobs:
        results, docs = ROOT / "benchmarks" / "results", ROOT / "docs"
        jobs = [(results / f"quality_{name}.csv", docs / f"front_{name}.svg") for name in MODELS]
    inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    for source, output in jobs:
        if not source.exists():
            print(f"Left out: there are no rows in {source.name}")
            continue
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": output.stem, "font.size": 9, **inks}):
            write(figure_of(read_rows(source)), output)
        print(f"Wrote {output.name}")


if __name__ == "__main__":
    main()
