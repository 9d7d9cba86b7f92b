"""Carries out a search: the map of sensitivity, the rungs, the climb, the finalists, the answer. In one or several
processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toma_diffusion.merge import Grid
from toma_lab.evaluation.plan import Item, Variant
from toma_lab.evaluation.run import shares
from toma_lab.metrics import MetricSet
from toma_lab.pipelines.generation import reports_steps
from toma_lab.tune.candidates import Candidates, count_expected, done_by, merges_over_frames, open_candidates, texts_of
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import Figures, Goal
from toma_lab.tune.learned import learned_texts
from toma_lab.tune.measure import ORIGINAL, Meter, turns_of
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
Seen = dict[Variant, Sequence[Item]]
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
    last, seen = work.climb(*work.search(candidates.variants, goal, size.climbs), goal)
    alive = finalists_of(last, goal, size.finalists)
    finals = work.measure(alive, plan.final_items, "finalists")
    for variant in substitutes(last, goal, alive)[: size.finalists]:
        if not answer(finals, goal).is_reached:
            finals |= work.measure([variant], plan.final_items, "more finalists")
    results = [_result(folder, variant, items, finals) for variant, items in seen.items()]
    found = answer(finals, goal)
    chosen = next((each for each in results if each.variant == found.chosen), None)
    return Outcome(goal, chosen, found.is_reached, tuple(results), candidates.left_out, sensitivity)


def _result(folder: TuneFolder, variant: Variant, items: Sequence[Item], finals: Mapping[Variant, Figures]) -> Result:
    if variant in finals:
        return Result(variant, finals[variant], is_finalist=True)
    measured = [folder.measurement(variant, item) for item in (*items, *folder.plan.final_items)]
    failure = next((each.failure for each in measured if each is not None and each.failure), "")
    return Result(variant, None if failure else figures_in(folder, variant, items), failure=failure)


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
        self.state.wait_for_everyone()
        found = {cell: self.folder.growth(*cell) or 0.0 for cell in cells}
        growth = tuple(tuple(found[index, step] for step in steps) for index in range(len(groups)))
        names = tuple(name_of(prober.blocks, group) for group in groups)
        return SensitivityMap(tuple(groups), names, steps, plan.steps, growth)

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
        self, variants: Sequence[Variant], goal: Goal, climbs: int, name: str = "search"
    ) -> tuple[dict[Variant, Figures], Seen]:
        """Measure candidates on more and more images, after each rung the better half. Returns those that are left, and
        for all the images that they were measured on.

        Args:
            climbs: how often computed steps are moved afterwards.
            name: of the stage.
        """
        plan, size = self.folder.plan, self.folder.plan.size
        alive, figures, seen = list(variants), dict[Variant, Figures](), Seen()
        for rung, images in enumerate(size.rungs):
            items = plan.items[:images]
            seen |= dict.fromkeys(alive, items)
            what = f"{name}, {images} of {size.rungs[-1]} {plan.thing}s"
            figures = self.measure(alive, items, what, later_measurements(size, len(alive), rung, climbs))
            alive = survivors(figures, goal, size.finalists)
        return {variant: each for variant, each in figures.items() if variant in alive}, seen

    def climb(self, figures: dict[Variant, Figures], seen: Seen, goal: Goal) -> tuple[dict[Variant, Figures], Seen]:
        """Move computed steps of the most promising candidate that skips steps, as long as that is closer to the
        original. Returns what `search` does: the closest schedule has taken the place of the candidate."""
        steps, climbs = self.folder.plan.steps, self.folder.plan.size.climbs
        best = next((variant for variant in ranked(figures, goal) if moved(variant, steps)), None)
        tried = {done_by(variant, steps, self._computed(variant, seen)) for variant in seen}
        for number in range(climbs):
            if best is None:  # nothing skips steps
                break
            others = moved(best, steps, self._computed(best, seen))
            near = [variant for variant in others if done_by(variant, steps) not in tried]
            tried |= {done_by(variant, steps) for variant in near}
            found, measured = self.search(near, CLOSEST, climbs - number - 1, f"steps moved, round {number + 1}")
            seen |= measured
            closest = min(found, key=lambda variant: found[variant].distance, default=best)
            if closest is best or found[closest].distance >= figures[best].distance:
                break
            figures = {each: figures[each] for each in figures if each != best} | {closest: found[closest]}
            best = closest
        return figures, seen

    def _computed(self, variant: Variant, seen: Seen) -> tuple[int, ...] | None:
        """The steps that a candidate computed, if it skipped others."""
        measured = self.folder.measurement(variant, seen[variant][0])
        return None if measured is None else measured.computed

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
        self, variants: Sequence[Variant], items: Sequence[Item], what: str, later: float = 0.0
    ) -> dict[Variant, Figures]:
        """Measure what is missing; `later` is what follows, about. Returns what did not fail."""
        (share,) = shares(self.state, [turns_of(self.folder, variants, items)])
        work = sum(len(candidates) for _, candidates in share)
        with self.bar.stage(what, work, later) as advance:
            for turn in share:
                self._announce(self.meter.measure(turn))
                advance(len(turn[1]))
        self.state.wait_for_everyone()
        found = {variant: figures_in(self.folder, variant, items) for variant in variants}
        return {variant: each for variant, each in found.items() if each is not None}
