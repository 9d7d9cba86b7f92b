"""An evaluation: every column makes the same pictures, which are compared with those of the model as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from toma_diffusion.checks import check_integer
from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_lab.columns import BASELINE, Column
from toma_lab.folder import RunFolder
from toma_lab.metrics import ClipMetric, ClipSample, ImageMetric, MetricSet, Sample, UnavailableError
from toma_lab.pipelines.clips import read_clip, settings_of, write_lossless
from toma_lab.plan import Item, Plan
from toma_lab.rows import Row
from toma_lab.runner import Maker, failure_of, free_memory, is_out_of_memory, shares

if TYPE_CHECKING:
    from accelerate import PartialState
    from rich.progress import Progress

ALL = "all"
"""In place of an item: metrics of all pictures of a column together."""
BASE = Column(BASELINE)
ALWAYS = ("ratio", "seconds", "speedup", "gain", "gain_source", "frames")
"""Columns of the table besides the metrics, also if they are empty."""


@dataclass(frozen=True, kw_only=True)
class EvalPlan(Plan):
    """All settings of an evaluation."""

    seeds: tuple[int, ...] = ()
    """For every prompt. Empty: prompt number n has seed n."""
    columns: tuple[Column, ...] = (BASE,)
    """The first is the baseline, with which the others are compared."""
    metrics: tuple[str, ...] = ()
    batch: int = 1
    """How many pictures are generated in one call of the pipeline."""
    blocks: int = 0
    """Transformer blocks of the model."""
    time_of: str = ""
    """The large model for whose time the gain is computed. Empty: it is measured."""
    paper: str = ""
    """The table of the paper that the columns belong to, if any."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise UsageError("a run needs at least one prompt.")
        for seed in self.seeds:
            self.request(Item(0, "", seed), self.steps)  # checks the values
        check_integer("batch", self.batch, minimum=1)
        repeated = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if repeated:
            raise UsageError(f"seed {repeated[0]} is given twice: the same image would be generated twice.")
        if not self.columns or self.columns[0] != BASE:
            raise UsageError(f"the first column must be the {BASELINE}: the others are compared with it.")
        names = [column.column_id for column in self.columns]
        for column in self.columns:
            column.steps_of(self.steps)  # raises if they are not fewer
            if names.count(column.column_id) > 1:
                raise UsageError(f"the method {column.title!r} is asked for twice.")

    @property
    def items(self) -> list[Item]:
        """All pictures of a column, prompt by prompt."""
        prompts = enumerate(self.prompts)
        return [Item(index, prompt, seed) for index, prompt in prompts for seed in self.seeds or (index,)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalPlan:
        """The inverse of `to_dict`."""
        return super().from_dict({**values, "columns": [Column.from_dict(each) for each in values["columns"]]})


class EvalFolder(RunFolder[EvalPlan]):
    """One evaluation on disk."""

    command, plan_class = "toma eval", EvalPlan

    def joint_row(self, column: Column) -> Row:
        """Metrics with one value for all pictures of a column, such as FID."""
        return self.rows.get(column_id=column.column_id, item=ALL) or {}


def sources_of(row: Row) -> dict[str, str]:
    """Name and hash of the weights of each metric in a row."""
    found: dict[str, str] = json.loads(row.get("sources") or "{}")
    return found


def evaluate(
    folder: EvalFolder,
    pipe: Any,
    metrics: MetricSet,
    state: PartialState,
    progress: Progress | None = None,
    image: Path | None = None,
) -> list[Row]:
    """Generate and score what is missing in a run, and write its table.

    Args:
        folder: the run. Existing pictures and rows are kept.
        pipe: the pipeline of the plan's model.
        metrics: those of the plan that can be computed here.
        state: of this process, from accelerate. Each process does its share. The first writes the table.
        progress: shows the progress of this process.
        image: what the clips of an image-to-video pipeline begin with.

    Returns:
        The rows of the table.
    """
    from toma_lab.table import rows_of

    work = Evaluation(folder, pipe, metrics, state, progress, image)
    work.run(folder.plan.columns)
    if state.is_main_process:
        folder.write_table(rows_of(folder, folder.plan.columns), (*ALWAYS, *folder.plan.metrics))
    state.wait_for_everyone()
    return folder.table()


@dataclass(eq=False)
class Evaluation:
    """Columns of one pipeline, compared in one folder."""

    folder: EvalFolder
    pipe: Any
    metrics: MetricSet
    state: PartialState
    progress: Progress | None = None
    image: Path | None = None
    warms_up: bool = True
    against: Mapping[str, Column] = field(default_factory=dict)
    """What the metrics of these names compare with, in place of the baseline."""

    def __post_init__(self) -> None:
        self._maker = Maker(self.pipe, self.folder.plan.steps, warms_up=self.warms_up)

    def run(self, columns: Sequence[Column]) -> None:
        """Generate and score what is missing of these columns. The references come first, or are there."""
        self.generate(columns)
        self.score(columns)
        self.score_jointly(columns)

    def missing(self, columns: Sequence[Column]) -> list[tuple[Column, tuple[Item, ...]]]:
        """The batches of which a picture is needed, batch by batch, each with all columns in turn.

        The order of the columns rotates from batch to batch, so that none always comes first: if the machine is busy
        for a while, it slows all of them alike. A batch of which some pictures exist is generated again as a whole: in
        a smaller one they would be rounded otherwise.
        """
        size, items = self.folder.plan.batch, self.folder.plan.items
        found = []
        for number, start in enumerate(range(0, len(items), size)):
            batch, first = tuple(items[start : start + size]), number % len(columns)
            for column in (*columns[first:], *columns[:first]):
                if any(self._lacks_picture(column, item) for item in batch):
                    found.append((column, batch))
        return found

    def _lacks_picture(self, column: Column, item: Item) -> bool:
        row = self.folder.item_row(column, item)
        is_needed = column == BASE or column in self.against.values() or self._lacking(column, row)
        return "seconds" not in row or (bool(is_needed) and not self.folder.picture(column, item).exists())

    def generate(self, columns: Sequence[Column]) -> None:
        """Generate all missing pictures."""
        (share,) = shares(self.state, [self.missing(columns)])
        with self._bar("generating", sum(len(batch) for _, batch in share)) as advance:
            for column, batch in share:
                advance(0, column)
                self._generate(column, batch)
                advance(len(batch), column)
        self._wait()

    def _generate(self, column: Column, batch: Sequence[Item]) -> None:
        plan, failure, made = self.folder.plan, "", None
        requests = [plan.request(item, column.requested_steps(plan.steps), self.image) for item in batch]
        size = 1 if len(batch) > 1 and column.mixes_images(find_denoisers(self.pipe)[0]) else len(batch)
        for start in range(0, len(batch), size):
            items, asked = batch[start : start + size], requests[start : start + size]
            try:
                made = self._maker.make(column, asked)
            except Exception as error:
                if column == BASE and not is_out_of_memory(error):  # nothing can be compared then
                    raise
                failure = failure_of(error)  # raises it again if it is a bug
            if failure:
                free_memory()
                self._say(f"Failed: {column.title}: {failure}. The same command tries it again.")
                for item in items:
                    self.folder.add(column, item, {"failure": failure})
                return
            assert made is not None
            cells = {"seconds": round(made.seconds, 4), "calls": made.calls, "batch": len(items)}
            cells |= {} if made.skipped is None else {"skipped": made.skipped}
            for item, request, picture in zip(items, asked, made.pictures, strict=True):
                about = {"model": plan.model, "column": column.to_dict(), **asdict(self.folder.facts)}
                write_lossless(picture, self.folder.picture(column, item), settings_of(request) | cells | about)
                frames = {"frames": len(picture.frames)} if plan.clips else {}
                size_cells = {"resolution": "x".join(map(str, picture.size))} | frames
                self.folder.add(column, item, cells | size_cells)

    @property
    def _metrics(self) -> Sequence[ImageMetric | ClipMetric]:
        return self.metrics.clip if self.folder.plan.clips else self.metrics.image

    def score(self, columns: Sequence[Column]) -> None:
        """Score all pictures that lack one of these metrics, or have it from other weights."""
        folder, size = self.folder, self.folder.plan.batch
        parts = shares(self.state, [[i for i in folder.plan.items if self._is_due(each, i)] for each in columns])
        with self._bar("scoring", sum(map(len, parts))) as advance:
            for column, items in zip(columns, parts, strict=True):
                for start in range(0, len(items), size):
                    self._score(column, items[start : start + size])
                    advance(len(items[start : start + size]), column)
        self._wait()

    def _is_due(self, column: Column, item: Item) -> bool:
        row = self.folder.item_row(column, item)
        return bool(self._lacking(column, row)) and self.folder.picture(column, item).exists()

    def _lacking(self, column: Column, row: Row) -> list[ImageMetric | ClipMetric]:
        sources = sources_of(row)
        possible = [each for each in self._metrics if not each.needs_reference or self._base(each) != column]
        return [each for each in possible if each.name not in row or sources.get(each.name, "") != each.source]

    def _base(self, metric: ImageMetric | ClipMetric) -> Column:
        """What a metric compares with."""
        return self.against.get(metric.name, BASE)

    def _score(self, column: Column, batch: Sequence[Item]) -> None:
        """Compute what each picture lacks, of several pictures at once."""
        picture, read = self.folder.picture, cache(self._read)
        rows = {item: self.folder.item_row(column, item) for item in batch}
        found: dict[Item, Row] = {item: {} for item in batch}
        sources = {item: sources_of(row) for item, row in rows.items()}
        sample: Any = ClipSample if self.folder.plan.clips else Sample
        for metric in self._metrics:
            base, items = self._base(metric), [item for item in batch if metric in self._lacking(column, rows[item])]
            if metric.needs_reference:
                items = [item for item in items if picture(base, item).exists()]
                others = [read(picture(base, item)) for item in items]
            else:
                others = [None for _ in items]
            owns = [read(picture(column, item)) for item in items]
            samples = [sample(*each) for each in zip(owns, [item.prompt for item in items], others, strict=True)]
            for item, value in zip(items, metric.scores(samples), strict=True):
                found[item][metric.name] = value
                sources[item][metric.name] = metric.source
        for item, values in found.items():
            self.folder.add(column, item, values | {"sources": json.dumps(sources[item])})

    def _read(self, path: Path) -> Any:
        """An image, or the frames of a clip."""
        if self.folder.plan.clips:
            return read_clip(path).frames
        with Image.open(path) as file:
            return file.convert("RGB")

    def score_jointly(self, columns: Sequence[Column]) -> None:
        """Compute FID and KID. They need all pictures of a column, so that each process does whole columns."""
        for metric in self.metrics.joint:
            lacking = [column for column in columns if self._lacks_joint(column, metric)]
            (share,) = shares(self.state, [lacking])
            with self._bar("comparing with real images", len(share)) as advance:
                for column in share:
                    advance(0, column)
                    paths = [self.folder.picture(column, item) for item in self.folder.plan.items]
                    try:
                        values = metric.scores(paths)
                    except UnavailableError as error:
                        self.metrics.missing.append(str(error))
                        break
                    sources = sources_of(self.folder.joint_row(column)) | dict.fromkeys(values, metric.source)
                    names = {"column_id": column.column_id, "item": ALL, "title": column.title}
                    self.folder.rows.add(names | values | {"sources": json.dumps(sources)})
                    advance(1, column)
        self._wait()

    def _lacks_joint(self, column: Column, metric: Any) -> bool:
        row, plan = self.folder.joint_row(column), self.folder.plan
        has_all = all(name in row and sources_of(row).get(name) == metric.source for name in metric.names)
        return not has_all and all(self.folder.picture(column, item).exists() for item in plan.items)

    def _wait(self) -> None:
        self.state.wait_for_everyone()
        self.folder.rows.refresh()

    def _say(self, line: str) -> None:
        if self.progress is not None:
            self.progress.console.print(line, highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Any]:
        """A function that advances the progress bar of this phase and names the current column."""
        if self.progress is None or not total:
            yield lambda count, column: None
            return
        bar, progress = self.progress.add_task(what, total=total), self.progress
        yield lambda count, column: progress.update(bar, advance=count, description=f"{what}: {column.title}")
        progress.update(bar, description=what)
