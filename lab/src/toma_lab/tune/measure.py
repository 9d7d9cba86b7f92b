"""Measures candidates: their times next to those of the original model, and the distances of their images or clips.

Candidates come in pairs, with the original between the two, so that each runs right before or after it: a busy machine
then slows both times alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from toma_diffusion.api import compiled_blocks, find_denoisers, graphs_obstacle
from toma_diffusion.engine.compile import compile_denoiser, undo_compile
from toma_lab.evaluation.plan import BASELINE, Item, Variant
from toma_lab.evaluation.run import applied, fitted, warm_up
from toma_lab.metrics import ClipSample, MetricSet, Sample
from toma_lab.pipelines.clips import Clip, ClipRequest, generate, write_lossless
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.tune.folder import Measurement, TuneFolder

if TYPE_CHECKING:
    from PIL.Image import Image

    from toma_diffusion.handle import ToMAHandle

    Generated = Image | Clip

ORIGINAL = Variant(BASELINE)
"""The model as it is."""
NOT_COMPILED = "none"
WARM_UP_STEPS_OF_A_CLIP = 4
"""All of them would take minutes, to save the seconds in which kernels are compiled."""
Turn = tuple[Item, tuple[Variant, ...]]
"""An image or clip, and one or two candidates that are measured on it together with the original."""


@dataclass(eq=False)
class Meter:
    """Measures on one pipeline."""

    folder: TuneFolder
    pipe: Any
    metrics: MetricSet
    image: Path | None = None
    """What the clips of an image-to-video pipeline begin with."""
    _ready: dict[Variant, Variant] = field(default_factory=dict)
    """Candidates that were run before in this process, fitted to the model where they must be."""
    _computed: dict[Variant, tuple[int, ...] | None] = field(default_factory=dict)
    """Which steps candidates computed that were run in this process, if they skipped others."""

    def measure(self, turn: Turn) -> float:
        """Measure and save one turn: the first candidate, the original, the second candidate. Returns the seconds of
        the original."""
        item, candidates = turn
        before = [(each, *self._tried(each, item)) for each in candidates[:1]]
        original, seconds = self._generate(ORIGINAL, item)
        self._save_image(ORIGINAL, item, original)
        for candidate, result, own_seconds in before:
            self._save(candidate, item, result, own_seconds, original, seconds)
        for candidate in candidates[1:]:
            self._save(candidate, item, *self._tried(candidate, item), original, seconds)
        return seconds

    def request(self, variant: Variant, item: Item) -> ImageRequest:
        """What the pipeline is asked for."""
        return self.folder.plan.request(variant, item, self.image)

    def _tried(self, variant: Variant, item: Item) -> tuple[Generated | str, float]:
        """The image or clip and its seconds; if a candidate cannot run here, the reason in place of the image."""
        try:
            return self._generate(variant, item)
        except Exception as error:  # out of memory, not compilable, not possible on this model: others may still be
            text = next(iter(str(error).strip().splitlines()), "")
            return f"{type(error).__name__}: {text}", 0.0

    def _generate(self, variant: Variant, item: Item) -> tuple[Generated, float]:
        plan = self.folder.plan
        request = self.request(variant, item)
        is_new = variant not in self._ready
        if is_new:  # always fitted by the same image, so that a resumed search gives the same
            self._ready[variant] = fitted(self.pipe, variant, self.request(variant, plan.items[0]), plan.steps)
        with applied(self.pipe, self._ready[variant], plan.steps) as handle, self._compiled(handle):
            if is_new or plan.compile != NOT_COMPILED:
                with warnings.catch_warnings():
                    # Sometimes few steps are run, of which none may lie in the window.
                    warnings.filterwarnings("ignore", message="a generation of .* was not made faster at all")
                    warm_up(self.pipe, [self._short(request)])
            started = perf_counter()
            (made,) = generate(self.pipe, [request])
            seconds = perf_counter() - started
            self._computed[variant] = None if handle is None else handle.summary().computed
            return made if isinstance(made, Clip) else made.convert("RGB"), seconds

    def _short(self, request: ImageRequest) -> ImageRequest:
        """What is generated to warm up. What is compiled must see steps of every kind."""
        if not isinstance(request, ClipRequest) or self.folder.plan.compile != NOT_COMPILED:
            return request
        return replace(request, steps=min(request.steps, WARM_UP_STEPS_OF_A_CLIP))

    @contextmanager
    def _compiled(self, handle: ToMAHandle | None) -> Iterator[None]:
        """Compile the denoisers, merged or not, for the duration of a `with` block."""
        mode = self.folder.plan.compile
        models = find_denoisers(self.pipe)
        if mode == NOT_COMPILED:
            yield
            return
        if handle is not None:
            handle.compile(mode)  # undone when merging is removed
        else:
            for model in models:
                compile_denoiser(model, mode, compiled_blocks(model), graphs_obstacle(model))
        try:
            yield
        finally:
            for model in models:
                undo_compile(model)

    def _save(
        self,
        variant: Variant,
        item: Item,
        result: Generated | str,
        seconds: float,
        original: Generated,
        original_seconds: float,
    ) -> None:
        if isinstance(result, str):
            self.folder.write_measurement(variant, item, Measurement.failed(result))
            return
        scores = self._scores(result, original, item.prompt)
        self._save_image(variant, item, result)
        measurement = Measurement(
            round(seconds, 5),
            round(original_seconds, 5),
            scores["psnr"],
            scores.get("lpips"),
            flicker=scores.get("flicker"),
            computed=self._computed[variant],
        )
        self.folder.write_measurement(variant, item, measurement)

    def _scores(self, made: Generated, original: Generated, prompt: str) -> dict[str, float]:
        """Of an image, or of a clip over all its frames."""
        if isinstance(made, Clip) and isinstance(original, Clip):
            clips = ClipSample(made.frames, prompt, original.frames)
            return {metric.name: metric.score(clips) for metric in self.metrics.clip}
        assert not isinstance(made, Clip)
        assert not isinstance(original, Clip)
        images = Sample(made, prompt, original)
        return {metric.name: metric.score(images) for metric in self.metrics.image}

    def _save_image(self, variant: Variant, item: Item, made: Generated) -> None:
        path = self.folder.image_path(variant, item)
        if path.exists():  # the original, which is generated for every two candidates
            return
        settings = {"prompt": item.prompt, "seed": item.seed, "variant": variant.to_dict()}
        write_lossless(made, path, settings)


def turns_of(folder: TuneFolder, candidates: Sequence[Variant], items: Sequence[Item]) -> list[Turn]:
    """What is not measured yet, image by image, two candidates at a time."""
    turns: list[Turn] = []
    for item in items:
        missing = [each for each in candidates if folder.measurement(each, item) is None]
        turns += [(item, tuple(missing[start : start + 2])) for start in range(0, len(missing), 2)]
    return turns
