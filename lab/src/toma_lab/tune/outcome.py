"""What a search found: answer.json, table.csv, tuned.json, and what the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.tuned import Tuned
from toma_lab.columns import BASELINE, Column, shortcut_from_dict
from toma_lab.columns.ours import Ours, named_after
from toma_lab.folder import read_json, write_json
from toma_lab.rows import Row
from toma_lab.tune.folder import ORIGINAL, TuneFolder, of_this_version
from toma_lab.tune.goal import LEAST_GAIN, Figures, Goal


@dataclass(frozen=True)
class Result:
    """One candidate."""

    column: Column
    figures: Figures | None
    """Of the finalists' images, or else of those of the search; None if it failed."""
    is_finalist: bool = False
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        figures = None if self.figures is None else asdict(self.figures)
        if figures is not None and not isfinite(figures["psnr"]):
            figures["psnr"] = str(figures["psnr"])
        return {
            "column": self.column.to_dict(),
            "title": self.column.title,
            "figures": figures,
            "is_finalist": self.is_finalist,
            "failure": self.failure,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """The inverse of `to_dict`."""
        figures = values["figures"]
        if figures is not None:
            figures = Figures(**figures | {"psnr": float(figures["psnr"])})
        return cls(Column.from_dict(values["column"]), figures, values["is_finalist"], values["failure"])


@dataclass(frozen=True)
class Outcome:
    """All candidates, and which is chosen."""

    goal: Goal
    chosen: Result | None
    """None: the model as it is."""
    is_reached: bool
    """Whether the chosen setting reaches the goal."""
    results: tuple[Result, ...]
    left_out: tuple[str, ...]
    """What could not be tried, and why."""

    @property
    def finalists(self) -> list[Result]:
        """In the order of their speed, the fastest first."""
        return sorted((each for each in self.results if each.is_finalist and each.figures), key=_slowness)

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        if self.chosen is None or self.chosen.figures is None:
            return f"No candidate reached the goal, {self.goal}. The answer is the model as it is. {self._advice}"
        found = f"{self.chosen.column.title}: {in_words(self.chosen.figures)}"
        if self.is_reached:
            return f"The answer to “{self.goal}” is {found}."
        return f"No candidate reached the goal, {self.goal}. The fastest is {found}. {self._advice}"

    @property
    def _advice(self) -> str:
        """What came nearest, which condition it failed, and what to do."""
        if self.goal.speed_up is not None:
            return "Ask for less speed, or try more with --budget medium."
        more = "try more with --budget medium."
        nearest = min(self.finalists, key=self._misses, default=None)
        if nearest is None or nearest.figures is None:
            return f"Allow a larger distance, or {more}"
        missed = self.goal.missed(nearest.figures)
        near = f"The nearest was {nearest.column.title}: {in_words(nearest.figures)}; {' and '.join(missed)}."
        if len(missed) == 1 and nearest.figures.speed_up < LEAST_GAIN:
            return f"{near} What is as near saves no time here: allow a larger distance, or {more}"
        return f"{near} Allow a larger distance, or {more}"

    def _misses(self, result: Result) -> tuple[int, float]:
        """How many conditions a finalist fails, and its distance."""
        assert result.figures is not None
        return len(self.goal.missed(result.figures)), result.figures.distance

    def write(self, folder: TuneFolder) -> None:
        """Save it as answer.json."""
        values = {
            "goal": asdict(self.goal),
            "chosen": None if self.chosen is None else self.chosen.column.column_id,
            "is_reached": self.is_reached,
            "results": [each.to_dict() for each in self.results],
            "left_out": list(self.left_out),
        }
        write_json(folder.answer_path, values)

    @classmethod
    def read(cls, folder: TuneFolder) -> Outcome:
        """From answer.json."""
        values = read_json(folder.answer_path)
        if values is None:
            raise UsageError(f"{str(folder.path)!r} has no answer yet: finish the search with `toma tune` first.")
        with of_this_version(folder.answer_path):
            results = tuple(Result.from_dict(each) for each in values["results"])
        return cls(
            Goal(**values["goal"]),
            next((each for each in results if each.column.column_id == values["chosen"]), None),
            values["is_reached"],
            results,
            tuple(values["left_out"]),
        )


def in_words(figures: Figures | None) -> str:
    """`1.42× as fast, LPIPS 0.031, PSNR 26.4 dB`, and of clips `flicker 1.20`."""
    if figures is None:
        return "not measured"
    lpips = "" if figures.lpips is None else f"LPIPS {figures.lpips:.3f}, "
    flicker = "" if figures.flicker is None else f", flicker {figures.flicker:.2f}"
    return f"{figures.speed_up:.2f}× as fast, {lpips}PSNR {figures.psnr:.1f} dB{flicker}"


def _slowness(result: Result) -> float:
    return 0.0 if result.figures is None else -result.figures.speed_up


def state_of(result: Result, outcome: Outcome) -> str:
    """What became of a candidate."""
    if result.failure:
        return f"failed: {result.failure}"
    if result == outcome.chosen:
        return "chosen"
    return "finalist" if result.is_finalist else "dropped in the search"


def write_table(folder: TuneFolder, outcome: Outcome) -> None:
    """Replace table.csv."""
    clip = folder.clip_size()
    common = folder.common_cells() | {"goal": str(outcome.goal)}
    common |= {"frames": clip.frames, "resolution": f"{clip.width}x{clip.height}"} if clip else {}
    folder.write_table(
        common | result.column.cells | {"state": state_of(result, outcome)} | _figures(result)
        for result in outcome.results
    )


def _figures(result: Result) -> Row:
    figures = result.figures
    if figures is None:
        return {}
    distances = {"lpips": figures.lpips, "psnr": figures.psnr, "flicker": figures.flicker}
    cells = {name: f"{value:.6g}" for name, value in distances.items() if value is not None}
    return {"images": figures.images, "speedup": f"{figures.speed_up:.4f}"} | cells


def to_file(folder: TuneFolder, outcome: Outcome) -> Tuned:
    """The file of what was chosen."""
    plan, facts = folder.plan, asdict(folder.facts)
    column = outcome.chosen.column if outcome.chosen else ORIGINAL
    measured: dict[str, Any] = {"goal": str(outcome.goal), "is_reached": outcome.is_reached}
    if outcome.chosen is not None and outcome.chosen.figures is not None:
        figures = outcome.chosen.figures
        measured |= {
            "speed_up": round(figures.speed_up, 4),
            "lpips": None if figures.lpips is None else round(figures.lpips, 5),
            "psnr": round(figures.psnr, 3) if isfinite(figures.psnr) else str(figures.psnr),
            "prompts": figures.images,
        }
        measured |= {} if figures.flicker is None else {"flicker": round(figures.flicker, 4)}
    device = facts.pop("gpu")
    measured |= {"model": plan.model, "device": device, "dtype": plan.dtype, "compile": plan.compile}
    measured |= {"versions": facts, "date": folder.date}
    shortcuts = tuple(each.to_dict() for each in column.shortcuts)
    own = {} if column.own is None else column.own.for_tuned()
    return Tuned(plan.model_class, plan.steps, **own, shortcuts=shortcuts, measured=measured, clip=folder.clip_size())


def from_file(tuned: Tuned) -> Column:
    """What `toma generate` applies."""
    shortcuts, own = tuple(shortcut_from_dict(each) for each in tuned.shortcuts), Ours.from_tuned(tuned)
    if own is not None:
        name = tuned.preset or (named_after(own.merge) if own.merge is not None else "skip")
    else:
        name = shortcuts[0].name if shortcuts else BASELINE
    return Column(name, own, shortcuts=shortcuts)
