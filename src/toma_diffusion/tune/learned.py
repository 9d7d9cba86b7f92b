"""Candidates whose skipped steps are predicted as it was learned on the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from toma_diffusion.api import apply_toma
from toma_diffusion.errors import UsageError
from toma_diffusion.evaluation.plan import Item
from toma_diffusion.pipelines.clips import generate
from toma_diffusion.skip.learning import FEWEST, Progress
from toma_diffusion.tune.measure import ORIGINAL, Meter
from toma_diffusion.tune.progress import GENERATED, SearchBar

PRESETS = ("balanced", "fast", "faster")
GENERATIONS = 6
"""Images that are learned from; of clips as few as can be."""
CHECKS = 3.0
"""What checking what was learned costs, in images, about."""
SEED = 1000
"""That of the first. The search measures other noise."""


def learned_texts(meter: Meter, bar: SearchBar, later: float) -> tuple[list[str], list[str]]:
    """Candidates, and why there are none. What was learned is kept in the folder of the search."""
    folder, plan = meter.folder, meter.folder.plan
    count = FEWEST if plan.clips else GENERATIONS
    if not folder.learned_path.exists():
        items = [Item(index, plan.prompts[index % len(plan.prompts)], SEED + index) for index in range(count)]
        calls = [partial(_generate, meter, item) for item in items]
        with bar.stage("learning to predict skipped steps", (count + CHECKS) / GENERATED, later) as advance:
            done = 0.0

            def show(progress: Progress) -> None:
                nonlocal done
                advance((progress.generations - done) / GENERATED)
                done = progress.generations

            handle = apply_toma(meter.pipe, "fast")
            try:
                handle.learn(calls, on_progress=show)
                handle.save(folder.learned_path)
            except UsageError as error:
                return [], [f"skipped steps predicted as it was learned: {error}"]
            finally:
                handle.remove()
    return [f"{preset}:learned={folder.learned_path}" for preset in PRESETS], []


def _generate(meter: Meter, item: Item) -> Any:
    return generate(meter.pipe, [meter.request(ORIGINAL, item)])
