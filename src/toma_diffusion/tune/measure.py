"""Measures candidates: their times next to those of the original model, and the distances of their images.

Candidates come in pairs, with the original between the two, so that each runs right before or after it: a busy machine
then slows both times alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from toma_diffusion.api import compiled_blocks, find_denoiser, graphs_obstacle
from toma_diffusion.evaluation.plan import BASELINE, Item, Variant
from toma_diffusion.evaluation.run import applied, fitted, warm_up
from toma_diffusion.hooks.compiler import compile_denoiser, undo_compile
from toma_diffusion.metrics import MetricSet, Sample
from toma_diffusion.pipelines.generation import generate_image, write_png
from toma_diffusion.tune.folder import Measurement, TuneFolder

if TYPE_CHECKING:
    from PIL.Image import Image

    from toma_diffusion.hooks.handle import ToMAHandle

ORIGINAL = Variant(BASELINE)
"""The model as it is."""
NOT_COMPILED = "none"
Turn = tuple[Item, tuple[Variant, ...]]
"""An image, and one or two candidates that are measured on it together with the original."""


@dataclass(eq=False)
class Meter:
    """Measures on one pipeline."""

    folder: TuneFolder
    pipe: Any
    metrics: MetricSet
    _ready: dict[Variant, Variant] = field(default_factory=dict)
    """Candidates that were run before in this process, fitted to the model where they must be."""

    def measure(self, turn: Turn) -> None:
        """Measure and save one turn: the first candidate, the original, the second candidate."""
        item, candidates = turn
        before = [(each, *self._tried(each, item)) for each in candidates[:1]]
        original, seconds = self._generate(ORIGINAL, item)
        self._save_image(ORIGINAL, item, original)
        for candidate, result, own_seconds in before:
            self._save(candidate, item, result, own_seconds, original, seconds)
        for candidate in candidates[1:]:
            self._save(candidate, item, *self._tried(candidate, item), original, seconds)

    def _tried(self, variant: Variant, item: Item) -> tuple[Image | str, float]:
        """The image and its seconds; if a candidate cannot run here, the reason in place of the image."""
        try:
            return self._generate(variant, item)
        except Exception as error:  # out of memory, not compilable, not possible on this model: others may still be
            text = next(iter(str(error).strip().splitlines()), "")
            return f"{type(error).__name__}: {text}", 0.0

    def _generate(self, variant: Variant, item: Item) -> tuple[Image, float]:
        plan = self.folder.plan
        request = plan.request(variant, item)
        is_new = variant not in self._ready
        if is_new:  # always fitted by the same image, so that a resumed search gives the same
            self._ready[variant] = fitted(self.pipe, variant, plan.request(variant, plan.items[0]))
        with applied(self.pipe, self._ready[variant], plan.steps) as handle, self._compiled(handle):
            if is_new or plan.compile != NOT_COMPILED:
                with warnings.catch_warnings():
                    # On a CPU few steps are run, of which none may lie in the window.
                    warnings.filterwarnings("ignore", message="a generation was not merged at all")
                    warm_up(self.pipe, [request])
            started = perf_counter()
            image = generate_image(self.pipe, request)
            return image.convert("RGB"), perf_counter() - started

    @contextmanager
    def _compiled(self, handle: ToMAHandle | None) -> Iterator[None]:
        """Compile the denoiser, merged or not, for the duration of a `with` block."""
        mode = self.folder.plan.compile
        model = find_denoiser(self.pipe)
        if mode == NOT_COMPILED:
            yield
            return
        if handle is not None:
            handle.compile(mode)  # undone when merging is removed
        else:
            compile_denoiser(model, mode, compiled_blocks(model), graphs_obstacle(model))
        try:
            yield
        finally:
            undo_compile(model)

    def _save(
        self,
        variant: Variant,
        item: Item,
        result: Image | str,
        seconds: float,
        original: Image,
        original_seconds: float,
    ) -> None:
        if isinstance(result, str):
            self.folder.write_measurement(variant, item, Measurement.failed(result))
            return
        sample = Sample(result, item.prompt, original)
        scores = {metric.name: metric.score(sample) for metric in self.metrics.image}
        self._save_image(variant, item, result)
        measurement = Measurement(round(seconds, 5), round(original_seconds, 5), scores["psnr"], scores.get("lpips"))
        self.folder.write_measurement(variant, item, measurement)

    def _save_image(self, variant: Variant, item: Item, image: Image) -> None:
        settings = {"prompt": item.prompt, "seed": item.seed, "variant": variant.to_dict()}
        write_png(image, self.folder.image_path(variant, item), settings)


def turns_of(folder: TuneFolder, candidates: Sequence[Variant], items: Sequence[Item]) -> list[Turn]:
    """What is not measured yet, image by image, two candidates at a time."""
    turns: list[Turn] = []
    for item in items:
        missing = [each for each in candidates if folder.measurement(each, item) is None]
        turns += [(item, tuple(missing[start : start + 2])) for start in range(0, len(missing), 2)]
    return turns
