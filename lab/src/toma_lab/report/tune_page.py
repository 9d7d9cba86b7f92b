"""Writes a search as one self-contained HTML page: it needs no network and no other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from toma_diffusion.tuned import FEWER_STEPS, Tuned
from toma_lab.report.page import MOST_CLIPS, MOST_ITEMS, Row, picture_of, render
from toma_lab.report.tune_plots import front_plot, kind_of, kinds_shown
from toma_lab.rows import Row as Measured
from toma_lab.rows import number
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.goal import LEAST_GAIN
from toma_lab.tune.outcome import Outcome, Result, state_of, to_file, write_table

PAGE = "tune.html"
FORMATS = {"images": "d", "speed_up": ".2f", "lpips": ".3f", "psnr": ".1f", "flicker": ".2f"}


@dataclass(frozen=True)
class Line:
    """One candidate in the table."""

    title: str
    kind: str
    state: str
    figures: Mapping[str, str]
    """By the names of `FORMATS`; empty where nothing was measured."""


def write_search(folder: TuneFolder, outcome: Outcome) -> Path:
    """Write the answer of a search in all its forms: answer.json, table.csv, tuned.json and the page, whose path is
    returned."""
    outcome.write(folder)
    write_table(folder, outcome)
    to_file(folder, outcome).write(folder.tuned_path)
    return write_tune_page(folder)


def write_tune_page(folder: TuneFolder) -> Path:
    """Write the page `tune.html` in the folder and return its path."""
    outcome, tuned, plan = Outcome.read(folder), Tuned.read(folder.tuned_path), folder.plan
    chosen = outcome.chosen.column if outcome.chosen else ORIGINAL
    return render(
        "tune.html.j2",
        folder.path / PAGE,
        clips=plan.clips,
        plan=plan,
        clip=tuned.clip,
        facts=asdict(folder.facts),
        date=folder.date,
        outcome=outcome,
        words=chosen.in_sentences(plan.steps),
        code=usage(tuned, plan.model),
        tuned=folder.tuned_path.read_text(encoding="utf-8"),
        front=front_plot(outcome, plan.steps),
        legend=kinds_shown(outcome, plan.steps),
        lines=[_line(each, outcome, plan.steps) for each in sorted(outcome.results, key=_rank)],
        has_lpips=bool(plan.lpips),
        rows=_rows(folder, outcome),
        first_merged=1,
        least_gain=LEAST_GAIN,
    )


def usage(tuned: Tuned, model: str) -> str:
    """How to use what was chosen, as code to copy."""
    command = f'toma generate "a prompt" --model {model} --config tuned.json'
    if any(each["name"] != FEWER_STEPS for each in tuned.shortcuts):
        return command
    result, more = ("image", "images") if tuned.clip is None else ("clip", "frames")
    frames = "" if tuned.clip is None else f", num_frames={tuned.clip.frames}"
    call = f"{result} = pipe(prompt, num_inference_steps={tuned.steps_left}{frames}).{more}[0]"
    if tuned.preset or tuned.merge or tuned.skip:
        call = f'from toma_diffusion import speed_up\n\nhandle = speed_up(pipe, "tuned.json")\n{call}'
    return f"{call}\n\n# or, in a shell:\n# {command}"


def _rank(result: Result) -> tuple[bool, int, float]:
    """Finalists first, then by the number of images they were measured on, then by speed."""
    figures = result.figures
    return not result.is_finalist, -figures.images if figures else 0, -figures.speed_up if figures else 0.0


def _line(result: Result, outcome: Outcome, steps: int) -> Line:
    values = {} if result.figures is None else asdict(result.figures)
    figures = {name: "" if values.get(name) is None else format(values[name], form) for name, form in FORMATS.items()}
    return Line(result.column.title, kind_of(result.column, steps), state_of(result, outcome), figures)


def _rows(folder: TuneFolder, outcome: Outcome) -> list[Row]:
    """The images or clips of the finalists, the original first and the chosen one next."""
    finalists = sorted(outcome.finalists, key=lambda each: each != outcome.chosen)
    rows = []
    for item in folder.plan.final_items[: MOST_CLIPS if folder.plan.clips else MOST_ITEMS]:
        pictures = []
        for column in (ORIGINAL, *(each.column for each in finalists)):
            path = folder.picture(column, item)
            if path.exists():
                title = "original" if column == ORIGINAL else column.title
                figures = _captions(folder.item_row(column, item))
                pictures.append(picture_of(path, title, f"{item.prompt}: {title}", figures, clips=folder.plan.clips))
        if len(pictures) > 1:
            rows.append(Row(item.prompt, item.seed, tuple(pictures)))
    return rows


def _captions(row: Measured) -> tuple[str, ...]:
    seconds, original = number(row, "seconds"), number(row, "baseline_seconds")
    captions = [] if seconds is None or original is None else [f"{seconds:.3g} s, original {original:.3g} s"]
    for name, title, unit in (("lpips", "LPIPS", ""), ("psnr", "PSNR", " dB"), ("flicker", "flicker", "")):
        if (value := number(row, name)) is not None:
            captions.append(f"{title} {value:{FORMATS[name]}}{unit}")
    return tuple(captions)
