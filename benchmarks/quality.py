"""What every setting costs in quality, on the demo models: the rows of benchmarks/results/quality_*.csv.

    python benchmarks/quality.py --lpips-weights FILE [--model bundled] [--only skip] [--steps 4,20] [--rows DIR]
    python benchmarks/quality.py --lpips-weights FILE --model FOLDER --setup bundled-video   # a model trained again
    python benchmarks/quality.py --lpips-weights FILE --model bundled --only skip --only lists --only solvers \\
        --only steps --only caches --steps 20 --images 4 --learned learned.json             # on a CPU

One process generates the same 32 images with every method, in one batch each, and compares them with those of the model
as it is. Every row is written as soon as it is measured. Killed, the same command goes on; rows of another commit or
machine are measured again. A method that a model cannot have is left out, with the reason. Rows of a CPU are in files
of their own.

Every row has two distances: to the pictures of the run's own number of steps, and to the converged ones of 100 steps.
The pictures of the model as it is are made once, and kept in the folder `local` next to the rows. The gain of what
saves whole steps is the number of steps by the number that was computed; that of merging is computed from measured
steps of a large model.

Clips of a video pipeline are compared frame by frame, and by their flicker. Their list of methods is another one.

A small model leaves a GPU idle between launches. Several processes may share the work, and the file:

    for k in 1 2 3 4 5 6 7 8; do python benchmarks/quality.py --share $k/8 ... & done; wait
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import PartialState
from filelock import FileLock
from quality_columns import CLIP_PARTS, PARTS, Conditions, columns_at
from table_rows import COMPUTED_STEPS, SKIPPING
from toma_lab.columns import NOISE_FLOOR, UNCHANGED, Column
from toma_lab.columns.ours import count_blocks
from toma_lab.columns.steps import FewerSteps
from toma_lab.costs import StepCosts
from toma_lab.evaluate import BASE, EvalFolder, EvalPlan, Evaluation
from toma_lab.facts import Facts, gather_facts
from toma_lab.metrics import MetricSet, Weights, open_metrics
from toma_lab.metrics.clips import OverFrames
from toma_lab.metrics.lpips import Lpips
from toma_lab.parsing import numbers
from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name
from toma_lab.pipelines.clips import generate
from toma_lab.pipelines.generation import ImageRequest, makes_clips
from toma_lab.plan import Item
from toma_lab.rows import Row, Rows
from toma_lab.table import rows_of

from toma_diffusion.engine.install import find_denoisers
from toma_diffusion.errors import UsageError
from toma_diffusion.presets import PRESETS
from toma_diffusion.skip.levels import Levels, read_levels
from toma_diffusion.skip.schedule import computed_steps

FOLDER = Path(__file__).parent
PROMPTS = (FOLDER / "quality_prompts.txt", FOLDER / "quality_unseen_prompts.txt")
"""16 by which settings were chosen at an earlier stage, and 16 others. Prompt number n has seed n."""
CLIP_PROMPTS = (FOLDER / "quality_clip_prompts.txt",)
METRICS, FLICKER = ("psnr", "ssim", "lpips"), "flicker"
CONVERGED, CONVERGED_STEPS = "lpips_converged", 100
"""LPIPS to the picture of so many steps."""
REFERENCE = "reference"
"""The part with the model as it is, which is always there, and its noise floor, unless only other parts are asked
for."""
RUNS = (REFERENCE, *dict.fromkeys((*PARTS, *CLIP_PARTS)))
KEY = ("run", "steps", "title")
SAME = ("images", "guidance", "dtype", "weights", *Facts.__dataclass_fields__)
"""Cells in which a row has to agree with this run, or it is measured again."""
BLANK = Item(0, "", 0)
Wanted = list[tuple[str, Column]]
"""Columns with the names of their parts."""


@dataclass(frozen=True)
class Setup:
    """How a model is run."""

    steps: tuple[int, ...] = (4, 8, 20, 50)
    guidance: float | None = None
    images: int = 32
    time_of: str = "sdxl"
    """The large model that it stands for: the gain in time is computed from that one's steps."""
    changes: str = ""
    """A field that is set in every method of merging that does not set it itself."""
    rows: str = ""
    """The file of its rows; empty: after the model."""
    batch: int = 32
    """Images or clips of one call."""
    prompts: tuple[Path, ...] = PROMPTS
    size: tuple[int, int] | None = None
    """Width and height of clips. None, as for `frames`: those of the pipeline."""
    frames: int | None = None
    has_converged: bool = True
    """Whether more steps make better pictures. Not those of a model that was trained for few."""


SETUPS: Mapping[str, Setup] = {
    "bundled": Setup(guidance=4.0, rows="quality_bundled.csv"),
    "bundled-4step": Setup((4, 8), guidance=1.0, rows="quality_4step.csv", has_converged=False),
    # The defaults of Flux leave the first five blocks of either kind alone, which are most of a small model's.
    # Its images cannot be merged in batches, so that there are fewer.
    "bundled-flux": Setup(guidance=4.0, images=16, time_of="flux", changes="skip_blocks=()", rows="quality_flux.csv"),
    # Those of Wan leave an eighth of the blocks alone, which of eight would be the first.
    # 20 steps come first: they have most rows. Eight clips, because the noise floor needs whole attention matrices: it
    # takes six times as long as the model as it is.
    "bundled-video": Setup(
        (20, 8, 50),
        guidance=4.0,
        images=16,
        time_of="wan-480p",
        changes="skip_blocks=()",
        rows="quality_video.csv",
        batch=8,
        prompts=CLIP_PROMPTS,
    ),
}


class LpipsConverged(Lpips):
    """LPIPS to the converged picture."""

    name = CONVERGED


class Converged(FewerSteps):
    """The model as it is, with many steps."""

    name = "converged"

    def steps_of(self, steps: int) -> int:
        return self.steps


def converged_column() -> Column:
    return Column("converged", shortcuts=(Converged.from_settings({"steps": CONVERGED_STEPS}),))


class _BegunError(Exception):
    """The denoiser was called."""


def levels_of(pipe: Any, request: ImageRequest) -> Levels | None:
    """The noise levels of a generation: it is begun, and ended before the denoiser runs."""

    def end(module: Any, given: Any) -> None:
        raise _BegunError

    hooks = [model.register_forward_pre_hook(end) for model in find_denoisers(pipe)]
    try:
        generate(pipe, [request])
    except _BegunError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return read_levels(pipe.scheduler, 0, request.steps, model_name=type(find_denoisers(pipe)[0]).__name__)


def computed_by_presets(pipe: Any, request: ImageRequest) -> dict[str, tuple[int, ...]]:
    """Which steps of such a generation each preset computes."""
    levels, skips = levels_of(pipe, request), {name: PRESETS[name](request.steps).skip for name in SKIPPING}
    return {
        name: tuple(range(request.steps)) if skip is None else computed_steps(skip, request.steps, levels)
        for name, skip in skips.items()
    }


def gain_of(row: Row, column: Column, costs: StepCosts) -> Row:
    """How many times fewer steps are computed. Of what merges tokens: how many times faster it would be on the large
    model; empty if that has not been measured."""
    steps, skipped, nothing = int(row["steps"]), float(row.get("skipped") or 0), {"gain": "", "gain_source": ""}
    if column.name == NOISE_FLOOR:
        return nothing
    if not column.merges(steps):
        computed = float(row.get("computed") or column.steps_of(steps) * (1 - skipped))
        return {"gain": f"{steps / computed:.4f}", "gain_source": COMPUTED_STEPS}
    gain = costs.gain(steps, column, cached=skipped, blocks=int(row["blocks"]))
    return nothing if gain is None else {"gain": f"{gain:.4f}", "gain_source": costs.model}


@dataclass(frozen=True)
class Job:
    """A model that is measured."""

    model: str
    """What is opened."""
    name: str
    """In the rows, and in what is printed: never a path."""
    setup: Setup

    def rows(self, folder: Path, device: str) -> Rows:
        """Those that it has. They are compared with each other, so that a CPU has a file of its own."""
        path = folder / (self.setup.rows or f"quality_{self.name}.csv")
        return Rows(path.with_stem(f"{path.stem}_cpu") if device == "cpu" else path, KEY)

    def costs(self) -> StepCosts:
        """The measured steps of the large model. Without any, merging has no gain."""
        try:
            return StepCosts.load(self.setup.time_of)
        except UsageError as error:
            print(f"Left out: gains of {self.name}: {error}", flush=True)
            return StepCosts(self.setup.time_of, ())

    def plan(self, pipe: Any, prompts: Sequence[str], steps: int, metrics: MetricSet) -> EvalPlan:
        """The pictures of one number of steps."""
        setup, every = self.setup, metrics.clip or metrics.image
        clips = makes_clips(pipe)
        width, height = (setup.size or (None, None)) if clips else (None, None)
        return EvalPlan(
            model=self.name,
            prompts=tuple(prompts),
            steps=steps,
            guidance=setup.guidance,
            clips=clips,
            width=width,
            height=height,
            frames=setup.frames if clips else None,
            dtype=str(pipe.dtype).removeprefix("torch."),
            weights=fingerprint(pipe),
            metrics=tuple(metric.name for metric in every),
            batch=setup.batch,
            blocks=count_blocks(find_denoisers(pipe)[0]),
        )


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """The models that the user asks for, each with what is usual for it."""
    models = options.model or ([options.setup] if options.setup else SETUPS)
    return [
        Job(model, options.setup or public_name(model), SETUPS.get(options.setup or model, Setup())) for model in models
    ]


def write_gains(job: Job, options: argparse.Namespace) -> int:
    """Compute the gains of a model's rows again, from the steps that have been measured by now. Rows of versions whose
    settings are not known any more keep theirs. Nothing fails."""
    for device in ("cuda", "cpu"):
        rows = job.rows(options.rows, device)
        known = [row for row in rows if row.get("column")]
        costs = job.costs() if known else StepCosts("", ())
        if known:
            rows.add(*(row | gain_of(row, Column.from_dict(json.loads(row["column"])), costs) for row in known))
    return 0


def share_of(text: str) -> tuple[int, int]:
    """`2/8` as two numbers."""
    found = numbers("share", text.replace("/", ","), int)
    if len(found) != 2 or not 1 <= found[0] <= found[1]:
        raise UsageError(f"share {text!r} is not allowed: give 2/8 for the second of eight.")
    return found[0], found[1]


def shared(wanted: Wanted, number: int, count: int) -> Wanted:
    """One of `count` shares. A column of several parts is in one share, where it is generated once."""
    mine = {*[*dict.fromkeys(column.alone() for _, column in wanted)][number - 1 :: count]}
    return [(run, column) for run, column in wanted if column.alone() in mine]


def wanted_of(pipe: Any, job: Job, options: argparse.Namespace) -> dict[int, Wanted]:
    """For every number of steps the columns that are this process's share. Says what is left out, once."""
    setup, parts = job.setup, CLIP_PARTS if makes_clips(pipe) else PARTS
    planned, said = dict[int, Wanted](), set[str]()
    for steps in numbers("steps", options.steps, int) or setup.steps:
        request = job.plan(pipe, [""], steps, MetricSet()).request
        at = Conditions(steps, computed_by_presets(pipe, request(BLANK, steps)), tuple(options.learned or ()))
        found: Wanted = []
        for run in options.only or (*parts, REFERENCE):
            columns, left_out = list[Column](), list[str]()
            if run == REFERENCE:
                columns = [UNCHANGED[1]]
            elif run not in parts:
                left_out = [f"a {type(pipe).__name__} has no such part."]
            else:
                columns, left_out = columns_at(parts[run], pipe, at, setup.changes)
            found += [(run, column) for column in columns]
            for reason in left_out:
                if reason not in said:
                    print(f"Left out: {run}: {reason}", flush=True)
                    said.add(reason)
        planned[steps] = shared(found, *share_of(options.share))
    return planned


def open_all(options: argparse.Namespace, setup: Setup, pipe: Any) -> MetricSet:
    """The metrics, with the distance to the converged pictures if it is wanted and possible."""
    clips = makes_clips(pipe)
    weights = Weights(lpips=options.lpips_weights)
    metrics = open_metrics([*METRICS, FLICKER] if clips else METRICS, weights, pipe.device, clips=clips)
    for reason in metrics.missing:
        print(f"Left out: {reason}", flush=True)
    if setup.has_converged and options.converged and metrics.source_of("lpips"):
        other = LpipsConverged(options.lpips_weights, pipe.device)
        if clips:
            metrics.clip.append(OverFrames(other))
        else:
            metrics.image.append(other)
    return metrics


def measure(job: Job, options: argparse.Namespace) -> int:
    """Everything that is missing for one model. Returns how many columns failed."""
    pipe: Any = load_pipeline(job.model, options.device or None)
    metrics = open_all(options, job.setup, pipe)
    rows, costs, facts = (
        job.rows(options.rows, pipe.device.type),
        job.costs(),
        gather_facts(pipe.device, options.commit),
    )
    prompts, failed = prompts_of(job.setup)[: options.images], 0
    planned = wanted_of(pipe, job, options)
    for steps, wanted in planned.items():
        count = len({column.alone() for _, column in wanted})
        print(f"{job.name}, {steps} steps: {len(wanted)} rows of {count} columns", flush=True)
    for steps, wanted in planned.items():
        plan = job.plan(pipe, prompts, steps, metrics)
        name = hashlib.sha256(json.dumps([plan.to_dict(), asdict(facts)]).encode()).hexdigest()[:12]
        folder = EvalFolder.start(options.rows / "local" / f"{job.name}-{steps}-{name}", plan, facts)
        same = {name: str(value) for name, value in (folder.common_cells() | {"images": len(prompts)}).items()}
        same |= {"weights": plan.weights}
        due = [each for each in wanted if not is_done(rows, each, same, converged=CONVERGED in plan.metrics)]
        if due:
            run = Measuring(folder, pipe, metrics, rows, costs)
            failed += sum(not run.add(part, column) for part, column in [(REFERENCE, BASE), *due])
    return failed


def is_done(rows: Rows, wanted: tuple[str, Column], same: Row, *, converged: bool) -> bool:
    """Whether it was measured by this commit on this machine, and compared with converged pictures if it must."""
    held = rows.get(run=wanted[0], steps=same["steps"], title=wanted[1].title)
    if held is None or (converged and not held.get(CONVERGED)):
        return False
    return all(held.get(name, "") == same[name] for name in SAME)


class Measuring:
    """Columns at one number of steps, one after the other. The pictures of the references are kept, for other processes
    too; those of the others are deleted when they are scored."""

    def __init__(self, folder: EvalFolder, pipe: Any, metrics: MetricSet, rows: Rows, costs: StepCosts) -> None:
        self.folder, self.rows, self.costs = folder, rows, costs
        self.made: dict[Column, Column] = {}
        """What was measured, by what it does: a column of several parts is generated once."""
        against = {CONVERGED: converged_column()} if CONVERGED in folder.plan.metrics else {}
        self.references = [BASE, *against.values()]
        self.evaluation = Evaluation(
            folder, pipe, metrics, PartialState(cpu=pipe.device.type == "cpu"), warms_up=False, against=against
        )
        with FileLock(folder.path / ".references.lock"):
            folder.rows.refresh()
            self.evaluation.run(self.references)

    def add(self, run: str, column: Column) -> bool:
        """Measure a column and write its row. Returns whether it did not fail."""
        started, plan = time.perf_counter(), self.folder.plan
        about, made = f"{plan.model}, {plan.steps} steps, {run}: {column.title}", self.made.get(column.alone())
        if made is None:
            made = self.made[column.alone()] = column
            self.evaluation.run([made])
        failure = next((row["failure"] for row in self._of(made) if row.get("failure")), "")
        if failure:
            print(f"Failed: {about}: {failure}", flush=True)
            return False
        for item in plan.items if made not in self.references else ():
            self.folder.picture(made, item).unlink(missing_ok=True)
        (row,) = rows_of(self.folder, [made])
        row |= column.cells | {"run": run, "blocks": plan.blocks, "weights": plan.weights}
        row |= {"lpips_weights": json.loads(row.pop("sources")).get("lpips", "")}
        row |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "speedup": ""}
        row |= {"seconds": f"{fmean(float(each['seconds']) for each in self._of(made)):.4f}"}
        row |= gain_of(row, column, self.costs)
        self.rows.add(row)
        shown = ("gain", *METRICS, CONVERGED, FLICKER)
        figures = ", ".join(f"{each} {row[each]}" for each in shown if row.get(each))
        print(f"{about}: {figures} ({time.perf_counter() - started:.1f} s)", flush=True)
        return True

    def _of(self, column: Column) -> list[Row]:
        return [self.folder.item_row(column, item) for item in self.folder.plan.items]


def prompts_of(setup: Setup) -> list[str]:
    """Those of a setup, spread evenly over its files."""
    prompts = [line for path in setup.prompts for line in path.read_text(encoding="utf-8").splitlines()]
    count = min(setup.images, len(prompts))
    return prompts[:: len(prompts) // count][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given again; default: all demo models")
    parser.add_argument("--setup", choices=SETUPS, help="what is usual for this model, whose name is in the rows")
    parser.add_argument("--only", choices=RUNS, action="append", help="this part; may be given again")
    parser.add_argument("--steps", default="", help="these numbers of steps, for all parts: 4,20")
    parser.add_argument("--gains", action="store_true", help="measure nothing: compute the gains of the rows again")
    parser.add_argument("--share", default="1/1", help="2/8: the second of eight processes that share the work")
    parser.add_argument("--lpips-weights", type=Path)
    parser.add_argument("--rows", type=Path, default=FOLDER / "results", help="folder of the rows")
    parser.add_argument("--images", type=int, help="the first prompts, so many; default: all of the model")
    parser.add_argument("--learned", action="append", help="a file of `toma learn`; may be given again")
    parser.add_argument(
        "--no-converged",
        dest="converged",
        action="store_false",
        help=f"do not compare with the images of {CONVERGED_STEPS} steps",
    )
    parser.add_argument("--device", default="")
    parser.add_argument("--commit", help="to record; default: that of the checkout")
    options = parser.parse_args()
    failed = 0
    for job in jobs_of(options):
        try:
            failed += measure(job, options) if not options.gains else write_gains(job, options)
        except UsageError as error:
            if options.model:
                raise SystemExit(f"Error: {error}") from error
            print(f"Left out: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
