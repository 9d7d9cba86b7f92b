"""Writes a search as one self-contained HTML page: it needs no network and no other files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from toma_diffusion.files import check_writable, replacing
from toma_diffusion.tuned import FEWER_STEPS, Tuned
from toma_lab.report.page import ASSETS, MOST_CLIPS, MOST_ITEMS, Row, picture_of
from toma_lab.report.tune_plots import front_plot, kind_of, kinds_shown, map_plot
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import LEAST_GAIN
from toma_lab.tune.measure import ORIGINAL
from toma_lab.tune.outcome import Outcome, Result
from toma_lab.tune.setting import in_sentences, to_file
from toma_lab.tune.table import state_of, write_table

PAGE = "tune.html"


@dataclass(frozen=True)
class Line:
    """One candidate in the table."""

    title: str
    kind: str
    images: str
    speed_up: str
    lpips: str
    psnr: str
    flicker: str
    state: str


def write_search(folder: TuneFolder, outcome: Outcome) -> Path:
    """Write the answer of a search in all its forms: answer.json, table.csv, tuned.json and the page, whose path is
    returned."""
    outcome.write(folder)
    write_table(folder, outcome)
    to_file(folder, outcome).write(folder.tuned_path)
    return write_tune_page(folder)


def write_tune_page(folder: TuneFolder) -> Path:
    """Write the page `tune.html` in the folder and return its path."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    outcome, tuned = Outcome.read(folder), Tuned.read(folder.tuned_path)
    path = folder.path / PAGE
    check_writable(path)
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("tune.html.j2").render(
        plan=folder.plan,
        clip=tuned.clip,
        facts=asdict(folder.facts),
        date=folder.date,
        outcome=outcome,
        words=in_sentences(outcome.chosen.variant if outcome.chosen else ORIGINAL, folder.plan.steps),
        code=usage(tuned, folder.plan.model),
        tuned=folder.tuned_path.read_text(encoding="utf-8"),
        front=front_plot(outcome, folder.plan.steps),
        legend=kinds_shown(outcome, folder.plan.steps),
        map=None if outcome.sensitivity is None else map_plot(outcome.sensitivity),
        lines=[_line(each, outcome, folder.plan.steps) for each in _sorted(outcome)],
        has_lpips=bool(folder.plan.lpips),
        rows=_rows(folder, outcome),
        first_merged=1,
        least_gain=LEAST_GAIN,
        css=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / ("clips.js" if folder.plan.clips else "page.js")).read_text(encoding="utf-8"),
    )
    with replacing(path) as file:
        file.write(page)
    return path


def usage(tuned: Tuned, model: str) -> str:
    """How to use what was chosen, as code to copy."""
    command = f'toma generate "a prompt" --model {model} --config tuned.json'
    if any(each["name"] != FEWER_STEPS for each in tuned.shortcuts):
        return command
    call = f"image = pipe(prompt, num_inference_steps={tuned.steps_left}).images[0]"
    if tuned.clip is not None:
        call = f"clip = pipe(prompt, num_inference_steps={tuned.steps_left}, num_frames={tuned.clip.frames}).frames[0]"
    if tuned.config is None:
        return f"{call}\n\n# or, in a shell:\n# {command}"
    merging = 'from toma_diffusion import apply_toma\n\nhandle = apply_toma(pipe, "tuned.json")'
    return f"{merging}\n{call}\n\n# or, in a shell:\n# {command}"


def _sorted(outcome: Outcome) -> list[Result]:
    """Finalists first, then by the number of images they were measured on, then by speed."""
    return sorted(
        outcome.results,
        key=lambda each: (
            not each.is_finalist,
            -each.figures.images if each.figures else 0,
            -each.figures.speed_up if each.figures else 0,
        ),
    )


def _line(result: Result, outcome: Outcome, steps: int) -> Line:
    figures = result.figures
    state = state_of(result, outcome)
    if figures is None:
        return Line(result.variant.title, kind_of(result.variant, steps), "", "", "", "", "", state)
    return Line(
        result.variant.title,
        kind_of(result.variant, steps),
        str(figures.images),
        f"{figures.speed_up:.2f}",
        "" if figures.lpips is None else f"{figures.lpips:.3f}",
        f"{figures.psnr:.1f}",
        "" if figures.flicker is None else f"{figures.flicker:.2f}",
        state,
    )


def _rows(folder: TuneFolder, outcome: Outcome) -> list[Row]:
    """The images or clips of the finalists, the original first and the chosen one next."""
    finalists = sorted(outcome.finalists, key=lambda each: each != outcome.chosen)
    rows = []
    for item in folder.plan.final_items[: MOST_CLIPS if folder.plan.clips else MOST_ITEMS]:
        pictures = []
        for variant in (ORIGINAL, *(each.variant for each in finalists)):
            path = folder.image_path(variant, item)
            if not path.exists():
                continue
            title = "original" if variant == ORIGINAL else variant.title
            measured = folder.measurement(variant, item)
            figures: list[str] = []
            if measured is not None:
                figures.append(f"{measured.seconds:.3g} s, original {measured.original_seconds:.3g} s")
                figures += [] if measured.lpips is None else [f"LPIPS {measured.lpips:.3f}"]
                figures.append(f"PSNR {measured.psnr:.1f} dB")
                figures += [] if measured.flicker is None else [f"flicker {measured.flicker:.2f}"]
            alt = f"{item.prompt}: {title}"
            pictures.append(picture_of(path, title, alt, tuple(figures), clips=folder.plan.clips))
        if len(pictures) > 1:
            rows.append(Row(item.prompt, item.seed, tuple(pictures)))
    return rows
