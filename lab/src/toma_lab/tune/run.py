"""Carries out a search: the candidates, the rungs, the climb, the finalists, the answer. Processes share the work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toma_lab.columns import Column
from toma_lab.metrics import MetricSet
from toma_lab.plan import Item
from toma_lab.runner import shares
from toma_lab.tune.bar import SearchBar
from toma_lab.tune.candidates import Candidates, done_by, moved, open_candidates, texts_of
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import Figures, Goal
from toma_lab.tune.learned import learned_texts
from toma_lab.tune.measure import Meter, turns_of
from toma_lab.tune.outcome import Outcome, Result
from toma_lab.tune.search import answer, figures_in, finalists_of, ranked, substitutes, survivors

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
        progress: shows how far this process is.
        image: what the clips of an image-to-video pipeline begin with.
    """
    work = Search(folder, Meter(folder, pipe, metrics, image), state, SearchBar(progress))
    candidates = work.candidates()
    plan, size = folder.plan, folder.plan.size
    last, seen = work.climb(*work.search(candidates.columns, goal), goal)
    alive = finalists_of(last, goal, size.finalists)
    finals = work.measure(alive, plan.final_items, "finalists")
    for column in substitutes(last, goal, alive)[: size.finalists]:
        if not answer(finals, goal)[1]:
            finals |= work.measure([column], plan.final_items, "more finalists")
    results = tuple(_result(folder, column, items, finals) for column, items in seen.items())
    best, is_reached = answer(finals, goal)
    chosen = next((each for each in results if each.column == best), None)
    return Outcome(goal, chosen, is_reached, results, candidates.left_out)


def _result(folder: TuneFolder, column: Column, items: Sequence[Item], finals: Mapping[Column, Figures]) -> Result:
    if column in finals:
        return Result(column, finals[column], is_finalist=True)
    measured = [folder.item_row(column, item) for item in (*items, *folder.plan.final_items)]
    failure = next((row["failure"] for row in measured if row.get("failure")), "")
    return Result(column, None if failure else figures_in(folder, column, items), failure=failure)


@dataclass(eq=False)
class Search:
    """The stages of a search, each shared out over the processes."""

    folder: TuneFolder
    meter: Meter
    state: PartialState
    bar: SearchBar

    def candidates(self) -> Candidates:
        """Those of the folder. If there are none, the first process makes them."""
        plan = self.folder.plan
        if self.state.is_main_process and Candidates.read(self.folder) is None:
            texts, why_not = list(plan.methods), list[str]()
            if not texts:
                learned, why_not = learned_texts(self.meter, self.bar)
                texts = [*learned, *texts_of(plan.budget, clips=plan.clips)]
            found = open_candidates(self.meter.pipe, texts, plan.steps)
            replace(found, left_out=(*found.left_out, *why_not)).write(self.folder)
            if plan.clips:
                count = plan.size.generated(len(found.columns))
                self.bar.say(f"Estimate: about {count} clips of {plan.steps} steps, fewer if candidates fail.")
        self.state.wait_for_everyone()
        written = Candidates.read(self.folder)
        assert written is not None
        return written

    def search(self, columns: Sequence[Column], goal: Goal, name: str = "search") -> tuple[dict[Column, Figures], Seen]:
        """Measure candidates on more and more images, after each rung the better half. Returns those that are left, and
        for all the images that they were measured on."""
        plan, size = self.folder.plan, self.folder.plan.size
        alive, figures, seen = list(columns), dict[Column, Figures](), Seen()
        for images in size.rungs:
            items = plan.items[:images]
            seen |= dict.fromkeys(alive, items)
            figures = self.measure(alive, items, f"{name}, {images} of {size.rungs[-1]} {plan.thing}s")
            alive = survivors(figures, goal, size.finalists)
        return {column: each for column, each in figures.items() if column in alive}, seen

    def climb(self, figures: dict[Column, Figures], seen: Seen, goal: Goal) -> tuple[dict[Column, Figures], Seen]:
        """Move computed steps of the most promising candidate that skips steps, as long as that is closer to the
        original. Returns what `search` does: the closest schedule has taken the place of the candidate."""
        steps = self.folder.plan.steps
        best = next((column for column in ranked(figures, goal) if moved(column, steps)), None)
        tried = {done_by(column, steps, self._computed(column, seen)) for column in seen}
        for number in range(self.folder.plan.size.climbs):
            if best is None:  # nothing skips steps
                break
            others = moved(best, steps, self._computed(best, seen))
            near = [column for column in others if done_by(column, steps) not in tried]
            tried |= {done_by(column, steps) for column in near}
            found, measured = self.search(near, CLOSEST, f"steps moved, round {number + 1}")
            seen |= measured
            closest = min(found, key=lambda column: found[column].distance, default=best)
            if closest is best or found[closest].distance >= figures[best].distance:
                break
            figures = {each: figures[each] for each in figures if each != best} | {closest: found[closest]}
            best = closest
        return figures, seen

    def _computed(self, column: Column, seen: Seen) -> tuple[int, ...] | None:
        """The steps that a candidate computed, if it skipped others."""
        computed = self.folder.item_row(column, seen[column][0]).get("computed_steps")
        return None if computed is None else tuple(computed)

    def measure(self, columns: Sequence[Column], items: Sequence[Item], what: str) -> dict[Column, Figures]:
        """Measure what is missing. Returns what did not fail."""
        (share,) = shares(self.state, [turns_of(self.folder, columns, items)])
        with self.bar.stage(what, sum(len(candidates) for _, candidates in share)) as advance:
            for turn in share:
                self.meter.measure(turn)
                advance(len(turn[1]))
        self.state.wait_for_everyone()
        self.folder.rows.refresh()
        found = {column: figures_in(self.folder, column, items) for column in columns}
        return {column: each for column, each in found.items() if each is not None}
