"""Measures candidates: their times next to those of the original model, and the distances of their images or clips.

Candidates come in pairs, with the original between the two, so that each runs right before or after it: a busy machine
then slows both times alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toma_lab.columns import Column
from toma_lab.metrics import ClipSample, MetricSet, Sample
from toma_lab.pipelines.clips import Clip, write_lossless
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.plan import Item
from toma_lab.rows import Row
from toma_lab.runner import Made, Maker, failure_of, free_memory
from toma_lab.tune.folder import ORIGINAL, TuneFolder

Turn = tuple[Item, tuple[Column, ...]]
"""An image or clip, and one or two candidates that are measured on it together with the original."""


@dataclass(eq=False)
class Meter:
    """Measures on one pipeline."""

    folder: TuneFolder
    pipe: Any
    metrics: MetricSet
    image: Path | None = None
    """What the clips of an image-to-video pipeline begin with."""

    @cached_property
    def maker(self) -> Maker:
        """Makes the images or clips."""
        plan = self.folder.plan
        return Maker(self.pipe, plan.steps, plan.compile, fits_with=self.request(ORIGINAL, plan.items[0]))

    def measure(self, turn: Turn) -> None:
        """Measure and save one turn: the first candidate, the original, the second candidate."""
        item, candidates = turn
        before = [(each, self._tried(each, item)) for each in candidates[:1]]
        original = self._make(ORIGINAL, item)
        self._save_picture(ORIGINAL, item, original)
        for candidate, made in before:
            self._save(candidate, item, made, original)
        for candidate in candidates[1:]:
            self._save(candidate, item, self._tried(candidate, item), original)

    def request(self, column: Column, item: Item) -> ImageRequest:
        """What the pipeline is asked for."""
        return self.folder.plan.request(item, column.requested_steps(self.folder.plan.steps), self.image)

    def _make(self, column: Column, item: Item) -> Made:
        return self.maker.make(column, [self.request(column, item)])

    def _tried(self, column: Column, item: Item) -> Made | str:
        """The image or clip, or the reason why it cannot be made here: others may still be."""
        try:
            return self._make(column, item)
        except Exception as error:
            failure = failure_of(error)  # raises it again if it is a bug
        free_memory()
        return failure

    def _save(self, column: Column, item: Item, made: Made | str, original: Made) -> None:
        if isinstance(made, str):
            self.folder.add(column, item, {"failure": made})
            return
        self._save_picture(column, item, made)
        cells: Row = {"seconds": round(made.seconds, 5), "baseline_seconds": round(original.seconds, 5)}
        cells |= {} if made.computed is None else {"computed_steps": list(made.computed)}
        scores = self._scores(_picture(made), _picture(original), item.prompt)
        self.folder.add(column, item, cells | scores)

    def _scores(self, made: Any, original: Any, prompt: str) -> Row:
        """Of an image, or of a clip over all its frames."""
        if isinstance(made, Clip):
            clips = ClipSample(made.frames, prompt, original.frames)
            return {metric.name: metric.score(clips) for metric in self.metrics.clip}
        images = Sample(made, prompt, original)
        return {metric.name: metric.score(images) for metric in self.metrics.image}

    def _save_picture(self, column: Column, item: Item, made: Made) -> None:
        path = self.folder.picture(column, item)
        if path.exists():  # the original, which is generated for every two candidates
            return
        write_lossless(_picture(made), path, {"prompt": item.prompt, "seed": item.seed, "column": column.to_dict()})


def _picture(made: Made) -> Any:
    (picture,) = made.pictures
    return picture if isinstance(picture, Clip) else picture.convert("RGB")


def turns_of(folder: TuneFolder, candidates: Sequence[Column], items: Sequence[Item]) -> list[Turn]:
    """What is not measured yet, image by image, two candidates at a time. What failed in this run is not tried again
    before the next."""
    turns: list[Turn] = []
    for item in items:
        missing = [each for each in candidates if not folder.item_row(each, item)]
        turns += [(item, tuple(missing[start : start + 2])) for start in range(0, len(missing), 2)]
    return turns
