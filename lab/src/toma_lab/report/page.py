"""Writes a run as one self-contained HTML page: it needs no network and no other files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing
from toma_lab.evaluation.folder import RunFolder
from toma_lab.evaluation.plan import Item, Variant
from toma_lab.evaluation.table import FORMATS, HEADINGS
from toma_lab.report.paper_table import paper_table
from toma_lab.report.pictures import Film, data_uri, film_of
from toma_lab.report.plots import gain_against_distance, legend, speed_against_quality

REPORT = "report.html"
MERGE_MAP = "merge-map.png"
"""A figure of what merges into what. It is shown if the folder has one."""
ASSETS = Path(__file__).with_name("assets")
MOST_ITEMS = 12
"""Rows of images on a page: more would take long to load. They are spread evenly over the run."""
MOST_CLIPS = 4
LARGEST_IMAGE, LARGEST_CLIP, LARGEST_MAP = 512, 384, 1400
"""Longest sides in pixels of what is shown."""
CAPTION_METRICS = ("psnr", "lpips", "clip_t", "flicker")
"""Metrics in the caption of an image or clip."""
MEANINGS: Mapping[str, str] = {
    "mse": "mean squared error to the unmerged image, of values from 0 to 255",
    "psnr": "peak signal-to-noise ratio to the unmerged image, in dB, from the mean squared error of all images",
    "ssim": "structural similarity to the unmerged image",
    "lpips": "perceptual distance to the unmerged image (AlexNet)",
    "dino": "distance of DINO features to those of the unmerged image",
    "clip_t": "how well the image fits its prompt, by CLIP",
    "flicker": "mean difference of the changes from frame to frame to those of the unmerged clip, of values from 0 to "
    "255",
    "fid": "Fréchet distance of Inception features to those of real images",
    "kid": "kernel distance of Inception features to those of real images",
}


@dataclass(frozen=True)
class Picture:
    """One image on the page."""

    title: str
    """The title of the variant."""
    alt: str
    uri: str
    width: int
    height: int
    figures: tuple[str, ...]
    film: Film | None = None
    """Of a clip, all its frames: the picture is then all of them in one, and its size that of a frame."""


@dataclass(frozen=True)
class Row:
    """All variants of one prompt and seed. The unmerged image comes first."""

    prompt: str
    seed: int
    pictures: tuple[Picture, ...]


def write_report(folder: RunFolder, output: Path | None = None) -> Path:
    """Write the page, by default `report.html` in the folder, and return its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    rows = folder.table()
    if not rows:
        raise UsageError(f"{str(folder.path)!r} has no table yet: finish the run with `toma eval` first.")
    path = output or folder.path / REPORT
    check_writable(path)
    table = paper_table(folder.plan.variants, rows)
    shown = choose_items(folder)
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("page.html.j2").render(
        plan=folder.plan,
        facts=asdict(folder.facts),
        date=folder.date,
        images=len(folder.plan.items),
        resolution=rows[0]["resolution"],
        frames=rows[0].get("frames", ""),
        table=table,
        front=gain_against_distance(table),
        plots=speed_against_quality(table),
        legend=legend(table),
        rows=[_row(folder, item) for item in shown],
        first_merged=next((i for i, each in enumerate(folder.plan.variants) if each.saves_time), 1),
        merge_map=_merge_map(folder.path / MERGE_MAP),
        configs=[(variant.title, variant.slug, _configuration(variant)) for variant in folder.plan.variants],
        meanings=[
            (HEADINGS[name], MEANINGS[name].replace("image", table.thing)) for name in table.columns if name in MEANINGS
        ],
        sources=_sources(rows),
        css=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / ("clips.js" if folder.plan.clips else "page.js")).read_text(encoding="utf-8"),
    )
    with replacing(path) as file:
        file.write(page)
    return path


def choose_items(folder: RunFolder) -> list[Item]:
    """The items to show, out of those that have an image of every variant."""
    plan = folder.plan
    finished = [item for item in plan.items if all(folder.image_path(each, item).exists() for each in plan.variants)]
    most = MOST_CLIPS if plan.clips else MOST_ITEMS
    if len(finished) <= most:
        return finished
    return [finished[index * len(finished) // most] for index in range(most)]


def _row(folder: RunFolder, item: Item) -> Row:
    pictures = []
    for variant in folder.plan.variants:
        path, alt = folder.image_path(variant, item), f"{item.prompt}: {variant.title}"
        figures = _figures(folder.item_scores(variant, item).values)
        pictures.append(picture_of(path, variant.title, alt, figures, clips=folder.plan.clips))
    return Row(item.prompt, item.seed, tuple(pictures))


def picture_of(path: Path, title: str, alt: str, figures: tuple[str, ...], *, clips: bool) -> Picture:
    """An image file, or that of a clip, as it is shown."""
    if not clips:
        return Picture(title, alt, *data_uri(path, LARGEST_IMAGE), figures)
    film = film_of(path, LARGEST_CLIP)
    return Picture(title, alt, film.uri, film.width, film.height, figures, film)


def _figures(values: Mapping[str, float]) -> tuple[str, ...]:
    found = [f"{values['seconds']:.3g} s"] if "seconds" in values else []
    for name in CAPTION_METRICS:
        if name in values:
            unit = " dB" if name == "psnr" else ""
            found.append(f"{HEADINGS[name].rstrip(' ↑↓')} {values[name]:{FORMATS[name]}}{unit}")
    return tuple(found)


def _merge_map(path: Path) -> Picture | None:
    if not path.exists():
        return None
    uri, width, height = data_uri(path, LARGEST_MAP)
    return Picture("", "which tokens are destinations, and which were merged into which", uri, width, height, ())


def _configuration(variant: Variant) -> str:
    if not variant.saves_time:
        return "nothing is merged"
    merging = {} if variant.config is None else variant.config.to_dict()
    return json.dumps(merging | {each.name: each.settings for each in variant.shortcuts}, indent=2)


def _sources(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Where the weights of the metrics come from, as noted in the table."""
    found: dict[str, str] = {}
    for row in rows:
        found |= json.loads(row["sources"] or "{}")
    return found
