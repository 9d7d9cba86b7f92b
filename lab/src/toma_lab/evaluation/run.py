"""Carries out a plan: generates and scores missing images, and writes the table. In one or several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from toma_diffusion.api import apply_toma
from toma_lab.evaluation.folder import RunFolder, Scores
from toma_lab.evaluation.plan import NOISE_FLOOR, Item, Variant
from toma_lab.evaluation.table import COLUMNS, SECONDS, SKIPPED, rows_of
from toma_lab.experiments.shortcuts.skipped import SkippedSteps
from toma_lab.metrics import ClipMetric, ClipSample, ImageMetric, MetricSet, Sample, UnavailableError
from toma_lab.pipelines.clips import generate, read_clip, settings_of, write_lossless
from toma_lab.pipelines.generation import ImageRequest, read_settings

if TYPE_CHECKING:
    from accelerate import PartialState
    from rich.progress import Progress

    from toma_diffusion.handle import ToMAHandle

WARM_UP_STEPS_ON_A_CPU = 4
"""Nothing is compiled there; only memory is allocated for the first time. With fewer, some presets do nothing, and
warn."""
Task = TypeVar("Task")


def evaluate(
    folder: RunFolder,
    pipe: Any,
    metrics: MetricSet,
    state: PartialState,
    progress: Progress | None = None,
    image: Path | None = None,
) -> list[dict[str, str]]:
    """Generate and score what is missing in a run, and write its table.

    Args:
        folder: the run. Existing images and scores are kept.
        pipe: the pipeline of the plan's model.
        metrics: those of the plan that can be computed here.
        state: of this process, from accelerate. Each process does its share. The first writes the table.
        progress: shows the progress of this process.
        image: what the clips of an image-to-video pipeline begin with.

    Returns:
        The rows of the table.
    """
    work = _Work(folder, pipe, metrics, state, progress, image)
    work.generate()
    work.score()
    work.score_jointly()
    if state.is_main_process:
        folder.write_table(COLUMNS, rows_of(folder))
    state.wait_for_everyone()
    return folder.table()


@dataclass(eq=False)
class _Work:
    folder: RunFolder
    pipe: Any
    metrics: MetricSet
    state: PartialState
    progress: Progress | None
    image: Path | None
    fitted: dict[Variant, Variant] = field(default_factory=dict)
    """The variants that have been warmed up, and what was fitted to the model."""

    def generate(self) -> None:
        """Generate all missing images.

        For each batch all variants are run in turn: if the machine is busy for a while, it slows all of them alike.
        """
        (share,) = shares(self.state, [self.folder.missing()])
        with self._bar("generating", sum(len(batch) for _, batch in share)) as advance:
            for variant, batch in share:
                advance(0, variant)
                self._warm_up(variant, batch)
                self._generate(variant, batch)
                advance(len(batch), variant)
        self.state.wait_for_everyone()

    def _warm_up(self, variant: Variant, batch: Sequence[Item]) -> None:
        """Once for each variant: fit it to the model, and generate a batch that does not count."""
        if variant in self.fitted:
            return
        requests = self._requests(variant, batch)
        self.fitted[variant] = fitted(self.pipe, variant, requests[0], self.folder.plan.steps)
        with applied(self.pipe, self.fitted[variant], self.folder.plan.steps):
            warm_up(self.pipe, requests)

    def _generate(self, variant: Variant, batch: Sequence[Item]) -> None:
        requests = self._requests(variant, batch)
        caches = any(shortcut.is_cache for shortcut in variant.shortcuts)
        counting = SkippedSteps.by(variant.shortcuts, self.pipe) if caches else nullcontext()
        with counting, applied(self.pipe, self.fitted[variant], self.folder.plan.steps):
            started = perf_counter()
            images = generate(self.pipe, requests)
            seconds = (perf_counter() - started) / len(batch)
        counted = {SKIPPED: counting.share} if isinstance(counting, SkippedSteps) else {}
        for item, request, image in zip(batch, requests, images, strict=True):
            settings = settings_of(request) | {
                SECONDS: round(seconds, 4),
                **counted,
                "batch": len(batch),
                "model": self.folder.plan.model,
                "variant": variant.to_dict(),
                **asdict(self.folder.facts),
            }
            write_lossless(image, self.folder.image_path(variant, item), settings)

    def _requests(self, variant: Variant, batch: Sequence[Item]) -> list[ImageRequest]:
        plan = self.folder.plan
        return [plan.request(item, variant.requested_steps(plan.steps), self.image) for item in batch]

    def score(self) -> None:
        """Score all images that lack one of these metrics, or have it from other weights."""
        variants = self.folder.plan.variants
        parts = shares(
            self.state,
            [[item for item in self.folder.plan.items if self._is_unscored(each, item)] for each in variants],
        )
        with self._bar("scoring", sum(map(len, parts))) as advance:
            for variant, items in zip(variants, parts, strict=True):
                for start in range(0, len(items), self.folder.plan.batch):
                    batch = items[start : start + self.folder.plan.batch]
                    self._score(variant, batch)
                    advance(len(batch), variant)
        self.state.wait_for_everyone()

    def _is_unscored(self, variant: Variant, item: Item) -> bool:
        scores = self.folder.item_scores(variant, item)
        return SECONDS not in scores.values or bool(self._lacking(variant, scores))

    @property
    def _metrics(self) -> Sequence[ImageMetric | ClipMetric]:
        return self.metrics.clip if self.folder.plan.clips else self.metrics.image

    def _lacking(self, variant: Variant, scores: Scores) -> list[ImageMetric | ClipMetric]:
        has_reference = variant != self.folder.plan.baseline
        possible = [metric for metric in self._metrics if has_reference or not metric.needs_reference]
        return [metric for metric in possible if not scores.has(metric.name, metric.source)]

    def _score(self, variant: Variant, batch: Sequence[Item]) -> None:
        """Compute what each image lacks, of several images at once."""
        baseline = self.folder.plan.baseline
        scores = {item: self.folder.item_scores(variant, item) for item in batch}
        samples: dict[Item, Any] = {}
        sample = ClipSample if self.folder.plan.clips else Sample
        for item in batch:
            path = self.folder.image_path(variant, item)
            reference = None if variant == baseline else self._read(self.folder.image_path(baseline, item))
            samples[item] = sample(self._read(path), item.prompt, reference)
            settings = read_settings(path)
            scores[item].values.update({name: float(settings[name]) for name in (SECONDS, SKIPPED) if name in settings})
        for metric in self._metrics:
            lacking = [item for item in batch if metric in self._lacking(variant, scores[item])]
            for item, value in zip(lacking, metric.scores([samples[each] for each in lacking]), strict=True):
                scores[item].values[metric.name] = value
                scores[item].sources[metric.name] = metric.source
        for item in batch:
            self.folder.write_item_scores(variant, item, scores[item])

    def _read(self, path: Path) -> Any:
        """An image, or the frames of a clip."""
        if self.folder.plan.clips:
            return read_clip(path).frames
        with Image.open(path) as file:
            return file.convert("RGB")

    def score_jointly(self) -> None:
        """Compute FID and KID. They need all images of a variant, so that each process does whole variants."""
        for metric in self.metrics.joint:
            lacking = [
                variant
                for variant in self.folder.plan.variants
                if not all(self.folder.joint_scores(variant).has(name, metric.source) for name in metric.names)
            ]
            (share,) = shares(self.state, [lacking])
            with self._bar("comparing with real images", len(share)) as advance:
                for variant in share:
                    advance(0, variant)
                    try:
                        found = metric.scores(self.folder.image_paths(variant))
                    except UnavailableError as error:
                        self.metrics.missing.append(str(error))
                        break
                    held = self.folder.joint_scores(variant)
                    sources = held.sources | dict.fromkeys(found, metric.source)
                    self.folder.write_joint_scores(variant, Scores(held.values | found, sources))
                    advance(1, variant)
        self.state.wait_for_everyone()

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Any]:
        """A function that advances the progress bar of this phase and names the current variant."""
        if self.progress is None or not total:
            yield lambda count, variant: None
            return
        bar, progress = self.progress.add_task(what, total=total), self.progress
        yield lambda count, variant: progress.update(bar, advance=count, description=f"{what}: {variant.title}")
        progress.update(bar, description=what)


def shares(state: PartialState, tasks: list[list[Task]]) -> list[list[Task]]:
    """This process's part of each list.

    The first process decides what is to be done: the others may look at the folder after work on it has started.
    """
    from accelerate.utils import broadcast_object_list

    agreed: list[list[Task]] = broadcast_object_list([tasks])[0]
    parts = []
    for each in agreed:
        with state.split_between_processes(each) as part:
            parts.append(list(part))
    return parts


def warm_up(pipe: Any, requests: Sequence[ImageRequest]) -> None:
    """Generate images that do not count: all steps on a GPU, where the first step of each kind compiles kernels."""
    if pipe.device.type == "cpu":
        requests = [replace(each, steps=min(each.steps, WARM_UP_STEPS_ON_A_CPU)) for each in requests]
    generate(pipe, requests)


@contextmanager
def applied(pipe: Any, variant: Variant, steps: int) -> Iterator[ToMAHandle | None]:
    """Apply a variant to the pipeline for the duration of a `with` block, for one generation of a run of `steps` steps.

    Yields the handle of token merging, if there is any. A cache is empty at the beginning, and gone at the end.
    """
    with ExitStack() as stack:
        for shortcut in variant.shortcuts:  # before merging, which leaves alone what a cache compares
            stack.enter_context(shortcut.applied(pipe, variant.steps_of(steps)))
        if variant.name == NOISE_FLOOR:
            # The same computation with other rounding: differences below this one are rounding noise.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield None if variant.config is None else stack.enter_context(apply_toma(pipe, variant.config))


def fitted(pipe: Any, variant: Variant, request: ImageRequest, steps: int) -> Variant:
    """The variant with what its shortcuts have to measure on the model first, by generating an image.

    Args:
        request: what the pipeline is asked for.
        steps: of the run, with nothing saved.
    """
    left = variant.steps_of(steps)
    with ExitStack() as stack:
        for shortcut in variant.shortcuts:
            if not shortcut.is_cache:  # a cache is fitted to the steps that are taken
                stack.enter_context(shortcut.applied(pipe, left))
        shortcuts = tuple(
            shortcut.fitted(pipe, lambda: generate(pipe, [request]), left) for shortcut in variant.shortcuts
        )
    return replace(variant, shortcuts=shortcuts)
