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
from toma_lab.tune.folder import ORIGINAL
from toma_lab.tune.measure import Meter
from toma_lab.tune.progress import GENERATED, SearchBar

GENERATIONS = 6
"""Images that are learned from; of clips as few as can be."""
CHECKS = 3.0
"""What checking what was learned costs, in images, about."""
SEED = 1000
"""That of the first. The search measures other noise."""


def learned_texts(meter: Meter, bar: SearchBar, later: float) -> tuple[list[str], list[str]]:
    """Candidates, and why there are none. What was learned is kept in the folder of the search, and so are the
    generations that it is learned from until then."""
    folder, plan = meter.folder, meter.folder.plan
    count = FEWEST if plan.clips else GENERATIONS
    if not folder.learned_path.exists():
        items = [Item(index, plan.prompts[index % len(plan.prompts)], SEED + index) for index in range(count)]
        calls = [partial(_generate, meter, item) for item in items]
        work = (1 + count + CHECKS + plan.size.learning) / GENERATED
        with bar.stage("learning to predict skipped steps", work, later) as advance:
            done = 0.0

            def show(progress: Progress) -> None:
                nonlocal done
                advance((progress.generations - done) / GENERATED)
                done = progress.generations

            started = perf_counter()
            calls[0]()
            minutes = plan.size.learning * (perf_counter() - started) / 60
            advance(1 / GENERATED)
            handle = speed_up(meter.pipe, "fast")
            try:
                with ignoring("left as it was"):  # what was refused is a candidate that is left out
                    handle.learn(calls, minutes=minutes, folder=folder.learning_path, on_progress=show)
                handle.save(folder.learned_path)
            except UsageError as error:
                return [], [f"skipped steps predicted as it was learned: {error}"]
            finally:
                handle.remove()
            FolderStore.clear(folder.learning_path)
    return [f"{preset}:learned={folder.learned_path}" for preset in PRESETS], []


def _generate(meter: Meter, item: Item) -> Any:
    return generate(meter.pipe, [meter.request(ORIGINAL, item)])
