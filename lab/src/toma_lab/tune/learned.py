"""Candidates whose skipped steps are predicted as it was learned on the model."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

from toma_diffusion import speed_up
from toma_diffusion.errors import UsageError
from toma_diffusion.presets import PRESETS
from toma_diffusion.skip.learning import FEWEST, Progress
from toma_diffusion.skip.store import FolderStore
from toma_lab.pipelines.clips import generate
from toma_lab.plan import Item
from toma_lab.runner import ignoring
from toma_lab.tune.bar import SearchBar
from toma_lab.tune.folder import ORIGINAL
from toma_lab.tune.measure import Meter

GENERATIONS = 6
"""Images that are learned from; of clips as few as can be."""
CHECKS = 3.0
"""What checking what was learned costs, in images, about."""
SEED = 1000
"""That of the first. The search measures other noise."""


def learned_texts(meter: Meter, bar: SearchBar) -> tuple[list[str], list[str]]:
    """Candidates, and why there are none. What was learned is kept in the folder of the search, and so are the
    generations that it is learned from until then."""
    path = meter.folder.learned_path
    if not path.exists():
        try:
            _learn(meter, bar)
        except UsageError as error:
            return [], [f"skipped steps predicted as it was learned: {error}"]
        FolderStore.clear(meter.folder.learning_path)
    return [f"{preset}:learned={path}" for preset in PRESETS], []


def _learn(meter: Meter, bar: SearchBar) -> None:
    folder, plan = meter.folder, meter.folder.plan
    count = FEWEST if plan.clips else GENERATIONS
    items = [Item(index, plan.prompts[index % len(plan.prompts)], SEED + index) for index in range(count)]
    calls = [partial(_generate, meter, item) for item in items]
    done = 0.0
    with bar.stage("learning to predict skipped steps", count + CHECKS + plan.size.learning) as advance:

        def show(progress: Progress) -> None:
            nonlocal done
            advance(progress.generations - done)
            done = progress.generations

        started = perf_counter()
        calls[0]()
        minutes = plan.size.learning * (perf_counter() - started) / 60
        with speed_up(meter.pipe, "fast") as handle, ignoring("left as it was"):  # what was refused is left out
            handle.learn(calls, minutes=minutes, folder=folder.learning_path, on_progress=show)
            handle.save(folder.learned_path)


def _generate(meter: Meter, item: Item) -> Any:
    return generate(meter.pipe, [meter.request(ORIGINAL, item)])
