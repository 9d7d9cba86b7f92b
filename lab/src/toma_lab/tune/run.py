"""Carries out a search: the map of sensitivity, the rungs, the climb, the finalists, the answer. In one or several
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toma_diffusion.merge import Grid
from toma_lab.columns import Column
from toma_lab.metrics import MetricSet
from toma_lab.pipelines.generation import reports_steps
from toma_lab.plan import Item
from toma_lab.runner import shares
from toma_lab.tune.candidates import Candidates, count_expected, done_by, merges_over_frames, open_candidates, texts_of
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.goal import Figures, Goal
from toma_lab.tune.learned import learned_texts
from toma_lab.tune.measure import Meter, turns_of
from toma_lab.tune.moves import moved
from toma_lab.tune.outcome import Outcome, Result
from toma_lab.tune.progress import MAP_CELL, SearchBar, later_measurements, measurements_left
from toma_lab.tune.search import answer, figures_in, finalists_of, ranked, substitutes, survivors
from toma_lab.tune.sensitivity import Prober, SensitivityMap, groups_of, name_of, sampled_steps

if TYPE_CHECKING:
    from accelerate import PartialState
    from rich.progress import Progress

CLOSEST = Goal(speed_up=1.0)
"""Of schedules that compute as many steps: all are equally fast, whatever the clock says."""
Seen = dict[Column, Sequence[Item]]
"""Candidates, with the images that they were measured on."""


def tune(
    folder: TuneFolder,
    pipe: Any,
    metrics: MetricSet,
    goal: Goal,
    state: PartialState,
    progress: Progress | None = None,
    image: Path | None = None,
) -> Outcome:
    """Search for the setting that reaches the goal. What the folder holds already is not measured again.

    Args:
        folder: the search.
        pipe: the pipeline of the plan's model.
        metrics: PSNR, LPIPS if its weights could be loaded, and of clips flicker.
        goal: what is wanted.
        state: of this process, from accelerate. Each process measures its share.
        progress: shows how far this process is, and the time left.
        image: what the clips of an image-to-video pipeline begin with.
    """
    work = _Work(folder, Meter(folder, pipe, metrics, image), state, SearchBar(progress, state.num_processes))
    sensitivity = work.draw_map()
    candidates = work.candidates(sensitivity)
    plan, size = folder.plan, folder.plan.size
    last, seen = work.climb(*work.search(candidates.columns, goal, size.climbs), goal)
    alive = finalists_of(last, goal, size.finalists)
    finals = work.measure(alive, plan.final_items, "finalists")
    for column in substitutes(last, goal, alive)[: size.finalists]:
        if not answer(finals, goal).is_reached:
            finals |= work.measure([column], plan.final_items, "more finalists")
    results = [_result(folder, column, items, finals) for column, items in seen.items()]
    found = answer(finals, goal)
    chosen = next((each for each in results if each.column == found.chosen), None)
    return Outcome(goal, chosen, found.is_reached, tuple(results), candidates.left_out, sensitivity)


def _result(folder: TuneFolder, column: Column, items: Sequence[Item], finals: Mapping[Column, Figures]) -> Result:
    if column in finals:
        return Result(column, finals[column], is_finalist=True)
    measured = [folder.measured(column, item) or {} for item in (*items, *folder.plan.final_items)]
    failure = next((row["failure"] for row in measured if row.get("failure")), "")
    return Result(column, None if failure else figures_in(folder, column, items), failure=failure)


@dataclass(eq=False)
class _Work:
    """The stages of a search, each shared out over the processes."""

    folder: TuneFolder
    meter: Meter
    state: PartialState
    bar: SearchBar

    @cached_property
    def prober(self) -> Prober:
        """On the first image or clip of the search."""
        return Prober(self.meter.pipe, self.meter.request(ORIGINAL, self.folder.plan.items[0]))

    def draw_map(self) -> SensitivityMap | None:
        """The growth of errors by blocks and steps; None for a model without blocks that we know of, and for a pipeline
        that does not say which step it is at."""
        plan, size, prober = self.folder.plan, self.folder.plan.size, self.prober
        if not prober.blocks or not reports_steps(self.meter.pipe):
            return None
        groups = groups_of(len(prober.blocks), size.map_groups)
        steps = sampled_steps(plan.steps, size.map_steps)
        cells = [(index, step) for step in steps for index in range(len(groups))]
        (share,) = shares(self.state, [[cell for cell in cells if self.folder.growth(*cell) is None]])
        with self.bar.stage("map of sensitivity", MAP_CELL * len(share), self._later()) as advance:
            if share:
                self._announce(prober.original()[1])
            for index, step in share:
                self.folder.write_growth(index, step, prober.growth(groups[index], step))
                advance(MAP_CELL)
        self._wait()
        found = {cell: self.folder.growth(*cell) or 0.0 for cell in cells}
        growth = tuple(tuple(found[index, step] for step in steps) for index in range(len(groups)))
        names = tuple(name_of(prober.blocks, group) for group in groups)
        return SensitivityMap(tuple(groups), names, steps, plan.steps, growth)

    def _wait(self) -> None:
        self.state.wait_for_everyone()
        self.folder.rows.refresh()

    def _later(self) -> float:
        """The measurements of the whole search, about."""
        plan = self.folder.plan
        expected = count_expected(self.meter.pipe, plan.methods, plan.budget, plan.steps, clips=plan.clips)
        return measurements_left(plan.size, expected, 0, plan.size.climbs)

    def candidates(self, sensitivity: SensitivityMap | None) -> Candidates:
        """Those of the folder. If there are none, the first process makes them."""
        plan = self.folder.plan
        if self.state.is_main_process and Candidates.read(self.folder) is None:
            grid = self.prober.grid if plan.clips and not plan.methods else None
            texts, reasons = list(plan.methods), self._not_made(sensitivity, grid)
            if not texts:
                learned, why_not = learned_texts(self.meter, self.bar, self._later())
                texts, reasons = [*learned, *texts_of(plan.budget, sensitivity, grid)], [*reasons, *why_not]
            found = open_candidates(self.meter.pipe, texts, plan.steps)
            replace(found, left_out=(*found.left_out, *reasons)).write(self.folder)
        self.prober.forget()
        self.state.wait_for_everyone()
        written = Candidates.read(self.folder)
        assert written is not None
        return written

    def search(
        self, columns: Sequence[Column], goal: Goal, climbs: int, name: str = "search"
    ) -> tuple[dict[Column, Figures], Seen]:
        """Measure candidates on more and more images, after each rung the better half. Returns those that are left, and
        for all the images that they were measured on.

        Args:
            climbs: how often computed steps are moved afterwards.
            name: of the stage.
        """
        plan, size = self.folder.plan, self.folder.plan.size
        alive, figures, seen = list(columns), dict[Column, Figures](), Seen()
        for rung, images in enumerate(size.rungs):
            items = plan.items[:images]
            seen |= dict.fromkeys(alive, items)
            what = f"{name}, {images} of {size.rungs[-1]} {plan.thing}s"
            figures = self.measure(alive, items, what, later_measurements(size, len(alive), rung, climbs))
            alive = survivors(figures, goal, size.finalists)
        return {column: each for column, each in figures.items() if column in alive}, seen

    def climb(self, figures: dict[Column, Figures], seen: Seen, goal: Goal) -> tuple[dict[Column, Figures], Seen]:
        """Move computed steps of the most promising candidate that skips steps, as long as that is closer to the
        original. Returns what `search` does: the closest schedule has taken the place of the candidate."""
        steps, climbs = self.folder.plan.steps, self.folder.plan.size.climbs
        best = next((column for column in ranked(figures, goal) if moved(column, steps)), None)
        tried = {done_by(column, steps, self._computed(column, seen)) for column in seen}
        for number in range(climbs):
            if best is None:  # nothing skips steps
                break
            others = moved(best, steps, self._computed(best, seen))
            near = [column for column in others if done_by(column, steps) not in tried]
            tried |= {done_by(column, steps) for column in near}
            found, measured = self.search(near, CLOSEST, climbs - number - 1, f"steps moved, round {number + 1}")
            seen |= measured
            closest = min(found, key=lambda column: found[column].distance, default=best)
            if closest is best or found[closest].distance >= figures[best].distance:
                break
            figures = {each: figures[each] for each in figures if each != best} | {closest: found[closest]}
            best = closest
        return figures, seen

    def _computed(self, column: Column, seen: Seen) -> tuple[int, ...] | None:
        """The steps that a candidate computed, if it skipped others."""
        computed = (self.folder.measured(column, seen[column][0]) or {}).get("computed_steps")
        return None if computed is None else tuple(computed)

    def _not_made(self, sensitivity: SensitivityMap | None, grid: Grid | None) -> list[str]:
        """Why kinds of candidates are missing that others have."""
        plan, reasons = self.folder.plan, list[str]()
        if plan.methods:
            return reasons
        if sensitivity is None and self.prober.blocks:
            name = type(self.meter.pipe).__name__
            reasons.append(f"candidates made from the map of sensitivity: a {name} does not say which step it is at.")
        if grid is not None and not merges_over_frames(grid):
            reasons.append(
                f"merging inside frames, region_frames=1: so all others do too, since the {grid.frames} frames of "
                "tokens cannot be divided into boxes."
            )
        return reasons

    def _announce(self, seconds: float) -> None:
        """An estimate of the time, from that of one clip. Images are quick."""
        plan = self.folder.plan
        if plan.clips:
            self.bar.announce(plan.thing, plan.steps, seconds)

    def measure(
        self, columns: Sequence[Column], items: Sequence[Item], what: str, later: float = 0.0
    ) -> dict[Column, Figures]:
        """Measure what is missing; `later` is what follows, about. Returns what did not fail."""
        (share,) = shares(self.state, [turns_of(self.folder, columns, items)])
        work = sum(len(candidates) for _, candidates in share)
        with self.bar.stage(what, work, later) as advance:
            for turn in share:
                self._announce(self.meter.measure(turn))
                advance(len(turn[1]))
        self._wait()
        found = {column: figures_in(self.folder, column, items) for column in columns}
        return {column: each for column, each in found.items() if each is not None}
