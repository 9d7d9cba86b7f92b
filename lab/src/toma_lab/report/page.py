"""Writes a run as one self-contained HTML page: it needs no network and no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing
from toma_lab.columns import Column
from toma_lab.evaluate import EvalFolder, sources_of
from toma_lab.inspection.figures import choose_evenly
from toma_lab.plan import Item
from toma_lab.report.paper_table import paper_table
from toma_lab.report.pictures import Film, data_uri, film_of
from toma_lab.report.plots import gain_against_quality, legend
from toma_lab.rows import Row as Measured
from toma_lab.rows import number
from toma_lab.table import FORMATS, HEADINGS

REPORT = "report.html"
MERGE_MAP = "merge-map.png"
"""A figure of what merges into what. It is shown if the folder has one."""
ASSETS = Path(__file__).with_name("assets")
SLIDER, PLAYER = "page.js", "clips.js"
MOST_ITEMS = 12
"""Rows of images on a page: more would take long to load. They are spread evenly over the run."""
MOST_CLIPS = 4
LARGEST_IMAGE, LARGEST_CLIP, LARGEST_MAP = 512, 384, 1400
"""Longest sides in pixels of what is shown."""
CAPTION_METRICS = ("psnr", "lpips", "clip_t", "flicker")
"""Metrics in the caption of an image or clip."""
MEANINGS: Mapping[str, str] = {
    "mse": "mean squared error to the original, of values from 0 to 255",
    "psnr": "peak signal-to-noise ratio to the original, in dB, from the mean squared error of all images",
    "ssim": "structural similarity to the original",
    "lpips": "perceptual distance to the original (AlexNet)",
    "dino": "distance of DINO features to those of the original",
    "clip_t": "how well the image fits its prompt, by CLIP",
    "flicker": "mean difference of the changes from frame to frame to those of the original, of values from 0 to 255",
    "fid": "Fréchet distance of Inception features to those of real images",
    "kid": "kernel distance of Inception features to those of real images",
}


@dataclass(frozen=True)
class Picture:
    """One image on the page."""

    title: str
    alt: str
    uri: str
    width: int
    height: int
    figures: tuple[str, ...]
    film: Film | None = None
    """Of a clip, all its frames: the picture is then all of them in one, and its size that of a frame."""


@dataclass(frozen=True)
class Row:
    """All pictures of one prompt and seed. The original comes first."""

    prompt: str
    seed: int
    pictures: tuple[Picture, ...]


def write_report(folder: EvalFolder, output: Path | None = None) -> Path:
    """Write the page, by default `report.html` in the folder, and return its path."""
    rows, plan = folder.table(), folder.plan
    if not rows:
        raise UsageError(f"{str(folder.path)!r} has no table yet: finish the run with `toma eval` first.")
    table = paper_table(plan.columns, rows)
    explained = [name for name in table.columns if name in MEANINGS]
    return render(
        "page.html.j2",
        output or folder.path / REPORT,
        clips=plan.clips,
        plan=plan,
        facts=asdict(folder.facts),
        date=folder.date,
        images=len(plan.items),
        resolution=rows[0]["resolution"],
        frames=rows[0].get("frames", ""),
        table=table,
        plots=gain_against_quality(table),
        legend=legend(table),
        rows=[_row(folder, item) for item in choose_items(folder)],
        first_merged=next((i for i, each in enumerate(plan.columns) if each.saves_time), 1),
        merge_map=_merge_map(folder.path / MERGE_MAP),
        configs=[(column.title, _configuration(column, plan.steps)) for column in plan.columns],
        meanings=[(HEADINGS[name], MEANINGS[name].replace("image", table.thing)) for name in explained],
        sources={name: source for row in rows for name, source in sources_of(row).items()},
    )


def render(template: str, path: Path, *, clips: bool, **values: Any) -> Path:
    """Write a page with its styles and script inside, and return its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    check_writable(path)
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    css, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", PLAYER if clips else SLIDER))
    page = environment.get_template(template).render(css=css, script=script, **values)
    with replacing(path) as file:
        file.write(page)
    return path


def choose_items(folder: EvalFolder) -> list[Item]:
    """The items to show, out of those that have a picture of every column."""
    plan = folder.plan
    finished = [item for item in plan.items if all(folder.picture(each, item).exists() for each in plan.columns)]
    return choose_evenly(finished, MOST_CLIPS if plan.clips else MOST_ITEMS)


def _row(folder: EvalFolder, item: Item) -> Row:
    pictures = []
    for column in folder.plan.columns:
        figures = _figures(folder.item_row(column, item))
        path, alt = folder.picture(column, item), f"{item.prompt}: {column.title}"
        pictures.append(picture_of(path, column.title, alt, figures, clips=folder.plan.clips))
    return Row(item.prompt, item.seed, tuple(pictures))


def picture_of(path: Path, title: str, alt: str, figures: tuple[str, ...], *, clips: bool) -> Picture:
    """An image file, or that of a clip, as it is shown."""
    if not clips:
        return Picture(title, alt, *data_uri(path, LARGEST_IMAGE), figures)
    film = film_of(path, LARGEST_CLIP)
    return Picture(title, alt, film.uri, film.width, film.height, figures, film)


def _figures(row: Measured) -> tuple[str, ...]:
    seconds = number(row, "seconds")
    found = [] if seconds is None else [f"{seconds:.3g} s"]
    for name in CAPTION_METRICS:
        if (value := number(row, name)) is not None:
            unit = " dB" if name == "psnr" else ""
            found.append(f"{HEADINGS[name].rstrip(' ↑↓')} {value:{FORMATS[name]}}{unit}")
    return tuple(found)


def _merge_map(path: Path) -> Picture | None:
    if not path.exists():
        return None
    uri, width, height = data_uri(path, LARGEST_MAP)
    return Picture("", "which tokens are destinations, and which were merged into which", uri, width, height, ())


def _configuration(column: Column, steps: int) -> str:
    """What it does, in words, and every setting as JSON."""
    own = {} if column.own is None else column.own.to_dict()
    settings = own | {each.name: each.settings for each in column.shortcuts}
    noted = json.dumps({name: value for name, value in settings.items() if value is not None}, indent=2)
    return "\n".join([*column.in_sentences(steps), *([noted] if settings else [])])
