"""Write the tables of the README and docs/ anew from the rows in benchmarks/results/. A test holds the pages to them.

A page says where a table stands; here, in speed_tables.py and quality_tables.py is what it holds, one function a name:

    <!-- rows: headline -->
    <!-- end -->
"""

import re
from collections.abc import Callable
from pathlib import Path

from quality_tables import (
    clips_table,
    converged_table,
    equal_cost_facts,
    equal_cost_summary,
    equal_cost_table,
    frames_table,
    front_table,
    presets_quality_table,
    quality_facts,
    settings_table,
)
from speed_tables import (
    cache_table,
    denoiser_table,
    facts,
    larger_table,
    merging_table,
    methods_table,
    newest,
    operator_table,
    pipeline_table,
    presets_table,
    speed_up,
    timed_table,
)
from table_rows import MISSING, RATIOS, ROOT, USUAL_STEPS, Row, figure, head, label_of_quality, read

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADLINE_MODELS = {
    "SDXL": {"model": "sdxl", "resolution": "1024x1024", "mode": "graph", "compile": "block", "steps": "10"},
    "Flux.1-dev": {"model": "flux", "resolution": "1024x1024", "mode": "compiled", "compile": "block", "steps": "4"},
}
"""Models in the README's table. One group of rows each, so that all speed-ups of a column have the same baseline."""
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
"""What merges tokens, with the fraction that is removed."""
HEADLINE_CHANGES = ("", "scale=1000.0", "skip_blocks=[]")
JUDGES = ("bundled", "flux")
"""The demo models whose images are compared."""
NOT_YET = tuple(f"quality_{name}_cpu.csv" for name in ("bundled", "flux", "video", "4step"))
"""Files that may not be there yet. Their tables are empty until then."""
NOTES = {"`toma`, `scale=1000`": "the paper's softmax"}


def headline_table() -> str:
    """What merges tokens: the speed-up of a denoiser, and how near the demo models' images stay."""
    lines = head(
        " | ".join(
            ["", *(f"{name}, speed-up" for name in HEADLINE_MODELS), "LPIPS", "PSNR, dB", "LPIPS, Flux-class model"]
        )
    )
    unet, flux = ([row for row in read(f"quality_{name}.csv") if row["steps"] == USUAL_STEPS] for name in JUDGES)
    speed = {name: newest(group) for name, group in HEADLINE_MODELS.items()}
    for label, ratio in HEADLINE_SETTINGS.items():
        speeds = [speed[name].get((label, ratio)) for name in HEADLINE_MODELS]
        near, of_flux = (
            {
                (label_of_quality(row), row["ratio"]): row
                for row in rows
                if row["run"] == "presets" and row["changed"] in HEADLINE_CHANGES
            }.get((label, ratio))
            for rows in (unet, flux)
        )
        note = f" ({NOTES[label]})" if label in NOTES else ""
        cells = [
            f"{label}{note}, {float(ratio):.0%} of the tokens removed",
            *(MISSING if row is None else speed_up(row) for row in speeds),
            *_nearness(near, of_flux),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _nearness(unet: Row | None, flux: Row | None) -> list[str]:
    """LPIPS and PSNR on the demo model, LPIPS on the Flux-class one."""
    found = [MISSING if unet is None else figure(unet[name], digits) for name, digits in (("lpips", 3), ("psnr", 1))]
    return [*found, MISSING if flux is None else figure(flux["lpips"], 3)]


def headline_facts() -> str:
    """What the speed-ups of the README's table were measured on, and against what."""
    used = {
        name: [row for key, row in newest(group).items() if key[1] == HEADLINE_SETTINGS.get(key[0])]
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
    lines = head(
        " | ".join([f"PSNR in dB, {tokens} tokens in {regions}", *(f"{float(r):.0%} removed" for r in RATIOS)])
    )
    for selection, title in titles.items():
        found = {row["ratio"]: f"{float(row['psnr_db']):.1f}" for row in rows if row["selection"] == selection}
        lines.append("| " + " | ".join([title, *(found.get(ratio, MISSING) for ratio in RATIOS)]) + " |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline_table,
    "headline facts": headline_facts,
    "equal cost": equal_cost_summary,
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
`presets on bundled`, `quality facts of bundled`; of skipped steps `equal cost on bundled`, `converged on bundled` and
`equal cost facts of bundled`; of clips `clips on video` and `frames on video`; and `settings:
sharing`, a part of quality.py."""
TABLES_OF_ROWS: dict[str, Callable[[str], str]] = {
    "timed: ": timed_table,
    "quality facts of ": quality_facts,
    "equal time on ": front_table,
    "equal cost on ": equal_cost_table,
    "equal cost facts of ": equal_cost_facts,
    "converged on ": converged_table,
    "presets on ": presets_quality_table,
    "settings: ": settings_table,
    "clips on ": clips_table,
    "frames on ": frames_table,
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


if __name__ == "__main__":
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if (new := rewritten(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"Wrote {page}")
