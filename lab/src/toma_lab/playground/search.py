"""Runs a search of `toma tune` for the page: below its folder, with live progress, and stoppable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from toma_diffusion import UsageError
from toma_diffusion.engine.install import find_denoisers
from toma_lab.facts import gather_facts
from toma_lab.metrics import MetricSet
from toma_lab.parsing import split_list
from toma_lab.pipelines.checkpoints import fingerprint, public_name
from toma_lab.playground.choice import request_of
from toma_lab.playground.models import Models
from toma_lab.prompts import built_in_prompts
from toma_lab.report.tune_page import write_search
from toma_lab.tune.candidates import open_candidates
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.goal import Goal
from toma_lab.tune.outcome import Outcome
from toma_lab.tune.plan import TunePlan, find_budget
from toma_lab.tune.run import tune

LIMIT, SPEED = "the fastest within a limit", "the nearest at a speed"
"""What a user may want."""
METRICS = ("psnr", "lpips")
"""Those that a search needs."""


class StoppedError(Exception):
    """The user stopped the search."""


@dataclass(frozen=True)
class Wish:
    """What a user asks for on the page. Numbers may be empty."""

    model: str
    want: str
    limit: float | None
    """The largest LPIPS, or without its weights the lowest PSNR."""
    speed_up: float | None
    steps: float | None
    guidance: float | None
    prompts: float | None
    """How many of the built-in prompts are used."""
    budget: str
    methods: str = ""
    """The user's own candidates. Empty: those of the budget."""


class Live(Progress):
    """Hands every update on, and shows nothing in the terminal."""

    def __init__(self, report: Callable[[str, float], None]) -> None:
        super().__init__(disable=True)
        self._report = report

    def update(self, *args: Any, **changes: Any) -> None:
        super().update(*args, **changes)
        task = self.tasks[0]
        left = f", about {_duration(task.time_remaining)} left" if task.time_remaining else ""
        self._report(f"{task.description}{left}", task.completed / task.total if task.total else 0.0)


class Searches:
    """Searches in folders of their own. The same wish goes on where it was."""

    def __init__(self, models: Models, folder: Path) -> None:
        self.models, self.folder = models, folder
        image = [metric for metric in models.metrics.image if metric.name in METRICS]
        self.metrics = MetricSet(image=image, missing=models.metrics.missing)

    @property
    def measures_lpips(self) -> bool:
        """Whether a limit is one of LPIPS."""
        return any(metric.name == "lpips" for metric in self.metrics.image)

    def run(self, wish: Wish, report: Callable[[str, float], None]) -> tuple[TuneFolder, Outcome]:
        """Search, and write the answer. `report` is called with what is being done and its share, and may raise."""
        from accelerate import PartialState

        goal = self._goal(wish)
        report("loading the model", 0.0)
        plan = self._plan(wish)
        name = hashlib.sha256(json.dumps(plan.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
        folder = TuneFolder.start(self.folder / name, plan, gather_facts(self.models.device))
        state = PartialState(cpu=self.models.device.type == "cpu")
        with folder.locked():
            outcome = tune(folder, self.models.pipe(wish.model), self.metrics, goal, state, Live(report))
            write_search(folder, outcome)
        return folder, outcome

    def _goal(self, wish: Wish) -> Goal:
        given = wish.speed_up if wish.want == SPEED else wish.limit
        if given is None:
            raise UsageError(f"the {'speed-up' if wish.want == SPEED else 'limit'} is empty: give a number.")
        if wish.want == SPEED:
            return Goal.of(speed_up=given)
        return Goal.of(max_lpips=given) if self.measures_lpips else Goal.of(min_psnr=given)

    def _plan(self, wish: Wish) -> TunePlan:
        prompts = built_in_prompts(wish.model)
        if wish.prompts is None or not 1 <= wish.prompts <= len(prompts):
            raise UsageError(f"prompts={wish.prompts} is not allowed: it must be from 1 to {len(prompts)}.")
        find_budget(wish.budget)
        request = request_of(prompts[0], 0, wish.steps, wish.guidance)
        pipe, methods = self.models.pipe(wish.model), tuple(split_list(wish.methods or ""))
        if methods:  # raises now if one is wrong
            open_candidates(pipe, methods, request.steps)
        return TunePlan(
            model=public_name(wish.model),
            model_class=type(find_denoisers(pipe)[0]).__name__,
            prompts=prompts[: int(wish.prompts)],
            steps=request.steps,
            guidance=request.guidance,
            dtype=str(pipe.dtype).removeprefix("torch."),
            weights=fingerprint(pipe),
            budget=wish.budget,
            methods=methods,
            lpips=self.metrics.source_of("lpips"),
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
