"""Generates a picture with the model as it is and with a faster one, and compares them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from toma_diffusion import Merge
from toma_lab.inspection.merge_map import MergeMap, MergeMapRecorder
from toma_lab.metrics import Sample
from toma_lab.pipelines.generation import ImageRequest, generate_image
from toma_lab.playground.choice import Choice
from toma_lab.playground.models import Models
from toma_lab.runner import warm_up

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_ORIGINALS = 32
"""How many pictures of the unchanged model are kept in memory."""
Report = Callable[[str, float], None]
"""Called with what is being done, and how much of it is done, from 0 to 1."""


@dataclass(frozen=True)
class Timed:
    """A picture and how long it took."""

    image: Image
    seconds: float
    at: str
    """The time of day when it was generated."""


@dataclass(frozen=True)
class Comparison:
    """Both pictures, and all that is said about them."""

    original: Timed
    accelerated: Timed
    is_original_new: bool
    """Whether the original was generated now, or is an earlier picture of the same request."""
    scores: dict[str, float]
    """By the name of the metric."""
    steps: tuple[str, ...]
    """What each step was: computed as usual, computed on merged tokens, or skipped."""
    maps: tuple[MergeMap, ...]
    """What merged into what."""
    summary: str
    notes: tuple[str, ...]
    """What the user should know about these figures."""

    @property
    def speed_up(self) -> float:
        return self.original.seconds / self.accelerated.seconds


class Comparer:
    """Generates and compares. Originals are kept, so that another method needs only one new picture."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._originals: OrderedDict[tuple[str, ImageRequest], Timed] = OrderedDict()
        self._warm: set[tuple[str, Choice | None]] = set()

    def compare(
        self, model: str, request: ImageRequest, choice: Choice, report: Report, *, again: bool, maps: bool
    ) -> Comparison:
        """Generate what is missing and compare.

        Args:
            again: whether to generate the original even if there is one of the same request.
            maps: whether to record what merges into what. The picture is then generated once more, not timed.
        """
        report("loading the model", 0.0)
        pipe = self.models.pipe(model)
        with choice.own.apply(pipe):  # raises now if it is not possible
            merge = choice.own.at(request.steps).merge
        found = self._record(pipe, request, choice, report) if maps and isinstance(merge, Merge) else []
        self._warm_up(model, pipe, request, choice, report, is_done=bool(found))
        is_new = again or (model, request) not in self._originals
        original = self._original(model, pipe, request, report, is_new)
        with choice.own.apply(pipe) as handle:
            accelerated = _timed(pipe, request, "accelerated", report)
            summary = handle.summary()
        notes = list(summary.notes)
        if maps and merge is not None and not isinstance(merge, Merge):
            notes.append(f"{merge.label} has no fixed destinations, so that no map is shown. ToMA has.")
        notes += [f"Not measured: {each}" for each in self.models.metrics.missing]
        return Comparison(
            original=original,
            accelerated=accelerated,
            is_original_new=is_new,
            scores=self._scores(request, original, accelerated),
            steps=choice.steps_of(request.steps, None if summary.skip is None else summary.skip.computed),
            maps=tuple(found),
            summary=str(summary),
            notes=tuple(notes),
        )

    def _original(self, model: str, pipe: Any, request: ImageRequest, report: Report, is_new: bool) -> Timed:
        if is_new:
            self._originals[model, request] = _timed(pipe, request, "original", report)
        self._originals.move_to_end((model, request))
        while len(self._originals) > MOST_ORIGINALS:
            self._originals.popitem(last=False)
        return self._originals[model, request]

    def _record(self, pipe: Any, request: ImageRequest, choice: Choice, report: Report) -> list[MergeMap]:
        """What merges into what: in a generation of its own, because recording takes time."""
        with choice.own.apply(pipe) as handle:
            recorder = MergeMapRecorder(handle)

            def on_step(step: int) -> None:
                recorder(step)
                report("recording what merges", (step + 1) / request.steps)

            generate_image(pipe, request, on_step)
        return recorder.maps

    def _warm_up(
        self, model: str, pipe: Any, request: ImageRequest, choice: Choice, report: Report, *, is_done: bool
    ) -> None:
        """Run both once before they are timed. `is_done`: the accelerated model has just been run."""
        if (model, None) not in self._warm:
            report("warming up", 0.0)
            warm_up(pipe, [request])
        if (model, choice) not in self._warm and not is_done:
            report("warming up", 0.5)
            with choice.own.apply(pipe):
                warm_up(pipe, [request])
        self._warm |= {(model, None), (model, choice)}

    def _scores(self, request: ImageRequest, original: Timed, accelerated: Timed) -> dict[str, float]:
        sample = Sample(accelerated.image, request.prompt, original.image)
        return {metric.name: metric.score(sample) for metric in self.models.metrics.image}


def _timed(pipe: Any, request: ImageRequest, what: str, report: Report) -> Timed:
    report(what, 0.0)
    started = perf_counter()
    # The picture is on the CPU when it returns, so that no GPU work is pending.
    image = generate_image(pipe, request, lambda step: report(what, (step + 1) / request.steps))
    seconds = perf_counter() - started
    return Timed(image.convert("RGB"), seconds, f"{datetime.now():%H:%M:%S}")
