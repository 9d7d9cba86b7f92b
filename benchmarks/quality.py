"""What every setting costs in quality, on the demo models: the rows of benchmarks/results/quality_*.csv.

    python benchmarks/quality.py --lpips-weights FILE [--model bundled] [--only presets] [--steps 4,20] [--rows DIR]

One process generates the same 32 images with every method and setting, in one batch each, and compares them with those
of the model as it is: presets and other methods, fewer steps and caches at all numbers of steps; then one setting after
another at few and at many steps. Every row is written as soon as it is measured. Killed, the same command goes on; rows
of another commit or machine are measured again. A method that a model cannot have is left out, with the reason.

A small model leaves a GPU idle between launches. Several processes may share the work, and the file:

    for k in 1 2 3 4 5 6 7 8; do python benchmarks/quality.py --share $k/8 ... & done; wait
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from toma_diffusion import ToMAConfig
from toma_diffusion.api import find_denoiser
from toma_diffusion.core import Schedule
from toma_diffusion.errors import UsageError
from toma_diffusion.evaluation import NOISE_FLOOR, Variant
from toma_diffusion.evaluation.run import applied, fitted
from toma_diffusion.evaluation.variants import (
    PAPER,
    UNMERGED,
    VariantSpec,
    count_blocks,
    mixes_images,
    paper_variants,
    variants_of,
)
from toma_diffusion.experiments.cells import MethodSpec
from toma_diffusion.experiments.costs import StepCosts
from toma_diffusion.experiments.facts import Facts, gather_facts
from toma_diffusion.experiments.parsing import numbers
from toma_diffusion.experiments.shortcuts import SHORTCUTS
from toma_diffusion.experiments.shortcuts.skipped import SkippedSteps
from toma_diffusion.files import check_writable, replacing
from toma_diffusion.methods import config_class, named_config
from toma_diffusion.metrics import Weights, open_metrics
from toma_diffusion.metrics.base import PairMetric, to_pixels
from toma_diffusion.metrics.pixels import pool_psnr
from toma_diffusion.pipelines.checkpoints import fingerprint, load_pipeline, public_name
from toma_diffusion.pipelines.generation import ImageRequest, generate_images

FOLDER = Path(__file__).parent
PROMPTS = (FOLDER / "quality_prompts.txt", FOLDER / "quality_unseen_prompts.txt")
"""16 by which settings were chosen at an earlier stage, and 16 others. Prompt number n has seed n."""
METRICS = ("psnr", "ssim", "lpips")
RATIOS, HALF = (0.25, 0.5, 0.75), (0.5,)
EVERY_STEP = "select_every=1;reweigh_every=1"
STAGE = "toma-stage:select_every=1"
"""What the sweeps change: `toma-stage` as it is, everything chosen in every step."""
BEFORE = (
    "toma-stage:num_regions=64;distance_weight=0;guidance_parts=1;share=plan;skip_blocks=();select_every=10"
    ";reweigh_every=5"
)
"""`toma-stage` as it was before its regions were sized in tokens, both halves of guidance chose together, every run of
blocks had its own plan, and the last block was left whole."""
GAINS = (1.15, 1.25, 1.43, 1.67, 2.0, 2.5)
"""How many times fewer steps are tried."""


@dataclass(frozen=True)
class Setup:
    """How a model is run."""

    steps: tuple[int, ...] = (4, 8, 20, 50)
    steps_of_sweeps: tuple[int, ...] = (4, 20)
    guidance: float | None = None
    images: int = 32
    time_of: str = "sdxl"
    """The large model that it stands for: the gain in time is computed from that one's steps."""
    changes: str = ""
    """A field that is set in every method of merging that does not set it itself."""
    rows: str = ""
    """The file of its rows; empty: after the model."""


SETUPS: Mapping[str, Setup] = {
    "bundled": Setup(guidance=4.0, rows="quality_bundled.csv"),
    "bundled-4step": Setup((4, 8), (4,), guidance=1.0, rows="quality_4step.csv"),
    # The defaults of Flux leave the first five blocks of either kind alone, which are most of a small model's.
    # Its images cannot be merged in batches, so that there are fewer.
    "bundled-flux": Setup(guidance=4.0, images=16, time_of="flux", changes="skip_blocks=()", rows="quality_flux.csv"),
}


@dataclass(frozen=True)
class Conditions:
    """What the list of methods depends on."""

    steps: int
    has_guidance: bool


@dataclass(frozen=True)
class Part:
    """Methods that are measured together."""

    methods: Callable[[Conditions], list[str]]
    ratios: tuple[float, ...] = HALF
    at_all_steps: bool = False


def fewer(steps: int) -> list[int]:
    """Numbers of steps that save 1.15 to 2.5 times, as near as whole numbers come."""
    return sorted({round(steps / gain) for gain in GAINS} - {0, steps}, reverse=True)


def caches(at: Conditions) -> list[str]:
    """Those of UNets and those of transformers; a model has one kind."""
    lite = "use_lite_mode=True"
    return [
        *(f"deepcache:interval={interval}" for interval in (2, 3, 5)),
        *(f"deepcache:interval={interval};branch=3" for interval in (2, 3)),
        *(f"first-block-cache:threshold={threshold}" for threshold in (0.05, 0.1, 0.2, 0.4)),
        *(f"taylorseer:cache_interval={interval};{lite}" for interval in (2, 3, 5) if interval < at.steps),
        *(f"taylorseer:cache_interval={interval}" for interval in (2, 3) if interval < at.steps),
        *(f"magcache:threshold={threshold}" for threshold in (0.03, 0.06, 0.12, 0.24)),
    ]


def reuse(at: Conditions) -> list[str]:
    """Parts of the model reused over time: which, how often, from which step on; alone and with merging."""
    deep = "part=deep"
    return [
        *("balanced", "fast", "faster"),
        *(f"reuse:period={period};{deep};order={order}" for period in (2, 3, 4, 6) for order in (0, 1)),
        *(f"reuse:period={period};{deep};start={start}" for period in (2, 3) for start in (0.1, 0.3, 0.4)),
        *(f"reuse:period={period};order={order}" for period in (2, 3, 4) for order in (0, 1)),
        *(f"toma-stage:ratio={ratio};period={period};{deep}" for ratio in (0.25, 0.5) for period in (2, 3)),
        *(f"toma-late:ratio={ratio};period={period};{deep}" for ratio in (0.25, 0.5) for period in (2, 3)),
        *(
            f"toma-stage:ratio=0.5;skip_blocks=();order=0;period={period};update={update}"
            for update in ("clusters", "destinations")
            for period in (2, 4)
        ),
    ]


def combined(at: Conditions) -> list[str]:
    """Merging together with what else saves time."""
    others = (f"steps:{round(at.steps / 1.25)}", "deepcache:interval=2", "first-block-cache:threshold=0.1")
    return [f"{preset}+{other}" for preset in ("toma-late", STAGE) for other in others]


def regions(at: Conditions) -> list[str]:
    """How many tokens a region has, how destinations are chosen in it, and how often."""
    return [
        f"toma-stage:region_tokens={tokens};selection_tokens={tokens};selection={selection};select_every={every}"
        f";reweigh_every={min(every, 5)}"
        for tokens in (16, 64, 256)
        for selection in ("facility-location", "random")
        for every in (1, 10)
    ]


def distances(at: Conditions) -> list[str]:
    """How much near tokens are preferred."""
    return [
        f"{STAGE};region_tokens={tokens};distance_weight={weight}"
        for tokens in (64, 256, 1024)
        for weight in (0, 0.1, 0.3, 1, 3)
    ]


def guidance(at: Conditions) -> list[str]:
    """A plan of its own for either half of guidance, or one for both."""
    if not at.has_guidance:
        return []
    return [f"{STAGE};region_tokens={tokens};guidance_parts={parts}" for tokens in (16, 256) for parts in (1, "auto")]


def attention(at: Conditions) -> list[str]:
    """What merged tokens weigh in attention, and how long they are."""
    return [
        f"{STAGE};size_aware_attention={size_aware};norm_preserving={norm_preserving}"
        for size_aware in (False, True)
        for norm_preserving in (False, True)
    ]


def where_and_when(at: Conditions) -> list[str]:
    """Steps, grids and blocks that are left whole."""
    step = 1 / at.steps
    windows = [(0.0, 1.0), (step, 1.0), (0.0, 1 - step), (step, 1 - step), (0.25, 1.0), (0.5, 1.0)]
    blocks = ["()", "(0,)", "(0,-1)", "(-2,-1)", "(0,1,-2,-1)"]
    return [
        *(f"{STAGE};window=({start:g},{end:g})" for start, end in dict.fromkeys(windows)),
        f"{STAGE};min_tokens=512",
        f"{STAGE};min_tokens=512;window=(0.0,{1 - step:g})",
        *(f"{STAGE};skip_blocks={each}" for each in blocks),
    ]


def sharing(at: Conditions) -> list[str]:
    """What runs of blocks share, and in which parts of a region destinations are selected."""
    return [
        f"{preset};region_tokens={tokens};selection_tokens={part};share={shared}"
        for preset in (STAGE, f"toma-stage:scope=block;{EVERY_STEP}")
        for tokens, part in ((16, 16), (64, 64), (256, 64), (256, 256), (1024, 64))
        for shared in ("plan", "destinations", "nothing")
    ]


PARTS: Mapping[str, Part] = {
    "steps": Part(lambda at: [f"steps:{number}" for number in fewer(at.steps)], at_all_steps=True),
    "caches": Part(caches, at_all_steps=True),
    "presets": Part(
        lambda at: [
            *("toma-late", "toma-stage", BEFORE, "toma", "toma:scale=1000", "toma-stripe", "toma-tile", "toma-once"),
            *("tomesd", "tofu", "todo"),
        ],
        RATIOS,
        at_all_steps=True,
    ),
    "reuse": Part(reuse, at_all_steps=True),
    "combined": Part(combined, (0.25, 0.5)),
    "regions": Part(regions),
    "distances": Part(distances),
    "guidance": Part(guidance, RATIOS),
    "attention": Part(attention, RATIOS),
    "where and when": Part(where_and_when),
    "sharing": Part(sharing),
}
REFERENCE = "reference"
"""The part with the model as it is and its noise floor, which is always there."""
RUNS = (REFERENCE, *PARTS, *PAPER)
"""All parts. The tables of the paper only if they are asked for, at 20 steps."""
STEPS_OF_THE_PAPERS_TABLES = 20
SETTINGS = tuple(field.name for field in fields(ToMAConfig))
COLUMNS = (
    *("run", "model", "steps", "guidance", "title", "method", "changed", "shortcuts", "skipped", *SETTINGS),
    *("images", *METRICS, "noise_floor_psnr", "noise_floor_lpips", "seconds"),
    *("gain", "gain_source", "blocks", "variant"),
    *("resolution", "dtype", "weights", "lpips_weights", *(field.name for field in fields(Facts)), "date"),
)
SAME = ("images", "guidance", "dtype", "weights", *(field.name for field in fields(Facts)))
"""Columns in which a row has to agree with this run, or it is measured again."""
Row = dict[str, str]


class Rows:
    """The rows of a model in their file."""

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self.path = path
        self.rows = self._read()

    def has(self, row: Row) -> bool:
        """Whether it was measured by this commit on this machine."""
        held = self.rows.get(self._key(row))
        return held is not None and all(held[name] == row[name] for name in SAME)

    def add(self, *rows: Row) -> None:
        """Put them in the place of older ones, and write the file anew, with what other processes have added."""
        with FileLock(self.path.with_suffix(".lock")):
            self.rows = self._read() | {self._key(row): row for row in rows}
            self._write()

    def _read(self) -> dict[tuple[str, ...], Row]:
        if not self.path.exists():
            return {}
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["run"] in RUNS and row.get("title")]  # not those of old
        return {self._key(row): {name: row.get(name) or "" for name in COLUMNS} for row in rows}

    def _write(self) -> None:
        with replacing(self.path) as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(self.rows.values(), key=lambda each: (RUNS.index(each["run"]), int(each["steps"]))))

    @staticmethod
    def _key(row: Row) -> tuple[str, ...]:
        return row["run"], row["steps"], row["title"]


@dataclass(eq=False)
class Measurement:
    """One model at one number of steps."""

    pipe: Any
    requests: list[ImageRequest]
    batch: int
    metrics: list[PairMetric]
    reference: Tensor | None = None
    """Its own images, [B, 3, height, width]."""

    def figures(self, variant: Variant) -> Row:
        """Of one variant: metrics, the share of skipped steps, seconds for an image (the first of their kind, with
        whatever has to be compiled)."""
        steps = self.requests[0].steps
        requests = [
            ImageRequest(each.prompt, each.seed, variant.steps_of(steps), each.guidance) for each in self.requests
        ]
        ready = fitted(self.pipe, variant, requests[0])
        batch = 1 if mixes_images(find_denoiser(self.pipe), variant) else self.batch
        images: list[Tensor] = []
        started = time.perf_counter()
        with SkippedSteps(find_denoiser(self.pipe)) as skipped:
            for start in range(0, len(requests), batch):
                with applied(self.pipe, ready, steps):
                    made = generate_images(self.pipe, requests[start : start + batch])
                images += map(to_pixels, made)
        seconds = (time.perf_counter() - started) / len(images)
        found = torch.cat(images).to(self.pipe.device)
        if self.reference is None:
            self.reference = found
        figures = {"images": str(len(images)), "seconds": f"{seconds:.4f}"}
        figures |= {"skipped": f"{skipped.share:.4f}" if skipped.share else ""}
        figures |= {"resolution": f"{found.shape[3]}x{found.shape[2]}"}
        return figures | self._scores(found)

    @torch.no_grad()
    def _scores(self, images: Tensor) -> Row:
        assert self.reference is not None
        if images is self.reference:
            return {}
        scores = {}
        for metric in self.metrics:
            values = metric.distances(images, self.reference).tolist()
            scores[metric.name] = f"{pool_psnr(values) if metric.name == 'psnr' else fmean(values):.6g}"
        return scores


def methods_of(part: str, at: Conditions, changes: str) -> list[str]:
    """The methods of a part, with the changes that the model needs."""
    given = changes.partition("=")[0]
    methods = []
    for text in PARTS[part].methods(at):
        merging, plus, shortcut = text.partition("+")
        name = merging.partition(":")[0]
        if changes and name not in SHORTCUTS and given not in merging and _merges(merging, given):
            merging += (";" if ":" in merging else ":") + changes
        methods.append(merging + plus + shortcut)
    return list(dict.fromkeys(methods))


def _merges(method: str, field: str) -> bool:
    """Whether a method merges tokens at any number of steps, and has that field."""
    spec = MethodSpec.parse(method)
    return named_config(spec.preset, dict(spec.overrides)).shows_ratio and config_class(spec.preset).knows(field)


def variants_at(part: str, model: Any, at: Conditions, changes: str) -> tuple[list[Variant], list[str]]:
    """The variants of a part, and a reason for each that is not possible on this model."""
    if part in PAPER:
        return paper_variants(model, part)
    variants: dict[Variant, None] = {}
    left_out = []
    for text in methods_of(part, at, changes):
        try:
            variants |= dict.fromkeys(variants_of(model, [VariantSpec.parse(text)], PARTS[part].ratios))
        except UsageError as error:
            left_out.append(f"{text}: {error}")
    return list(variants), left_out


def row_of(run: str, variant: Variant, common: Row) -> Row:
    """What is known before anything is generated."""
    config = {} if variant.config is None else variant.config.to_dict()
    return (
        dict.fromkeys(COLUMNS, "")
        | common
        | {name: str(config.get(name, "")) for name in SETTINGS}
        | {"run": run, "title": variant.title, "method": variant.key["method"]}
        | {"changed": "; ".join(f"{name}={value}" for name, value in variant.asked_for.items())}
        | {"variant": json.dumps(variant.to_dict(), separators=(",", ":"))}
        | {"shortcuts": "+".join(shortcut.text for shortcut in variant.shortcuts)}
    )


def gain_of(row: Row, costs: StepCosts) -> Row:
    """How many times faster it would be on the large model; empty if that has not been measured."""
    variant = Variant.from_dict(json.loads(row["variant"]))
    gain = costs.gain(
        int(row["steps"]),
        preset=variant.name,
        config=variant.config,
        shortcuts=variant.shortcuts,
        skipped=float(row["skipped"] or 0),
        blocks=int(row["blocks"]),
    )
    if gain is None or variant.name == NOISE_FLOOR:
        return {"gain": "", "gain_source": ""}
    schedule, steps = Schedule() if variant.config is None else Schedule.from_config(variant.config), int(row["steps"])
    counted = schedule.reuses_any(steps) and not schedule.corrects(steps) and costs.is_counted(variant.config)
    return {"gain": f"{gain:.4f}", "gain_source": f"{costs.model}, multiplications" if counted else costs.model}


def note_of(row: Row, costs: StepCosts) -> str:
    """What its gain does not count; empty if it has none, or counts everything."""
    variant = Variant.from_dict(json.loads(row["variant"]))
    step = costs.step_of_preset(variant.name, variant.config)
    return step.note if row["gain"] and step is not None else ""


def write_gains(name: str, options: argparse.Namespace) -> int:
    """Compute the gains of all rows of a model again, from the steps that have been measured by now. Nothing fails."""
    setup = SETUPS.get(name, Setup())
    rows = Rows(options.rows / (setup.rows or f"quality_{public_name(name)}.csv"))
    costs = StepCosts.load(setup.time_of)
    rows.add(*(row | gain_of(row, costs) for row in rows.rows.values()))
    return 0


def share_of(text: str) -> tuple[int, int]:
    """`2/8` as two numbers."""
    found = numbers("share", text.replace("/", ","), int)
    if len(found) != 2 or not 1 <= found[0] <= found[1]:
        raise UsageError(f"share {text!r} is not allowed: give 2/8 for the second of eight.")
    return found[0], found[1]


def plan(model: Any, setup: Setup, options: argparse.Namespace) -> Iterator[tuple[int, list[tuple[str, Variant]]]]:
    """For every number of steps the variants with their parts. Says what is left out, once."""
    said = set()
    for steps in numbers("steps", options.steps, int) or setup.steps:
        at = Conditions(steps, setup.guidance is None or setup.guidance > 1)
        found = []
        for run in options.only or PARTS:
            sweeps = [STEPS_OF_THE_PAPERS_TABLES] if run in PAPER else setup.steps_of_sweeps
            is_due = options.steps or steps in sweeps or (run in PARTS and PARTS[run].at_all_steps)
            variants, left_out = variants_at(run, model, at, setup.changes) if is_due else ([], [])
            found += [(run, variant) for variant in variants]
            for reason in left_out:
                if reason not in said:
                    print(f"Left out: {run}: {reason}", flush=True)
                    said.add(reason)
        number, count = share_of(options.share)
        yield steps, found[number - 1 :: count]


def measure(name: str, options: argparse.Namespace) -> int:
    """Everything that is missing for one model. Returns how many variants failed."""
    setup = SETUPS.get(name, Setup())
    setup = setup if options.changes is None else replace(setup, changes=options.changes)
    pipe: Any = load_pipeline(name, options.device or None)
    model = find_denoiser(pipe)
    opened = open_metrics(METRICS, Weights(lpips=options.lpips_weights), pipe.device)
    for reason in opened.missing:
        print(f"Left out: {reason}", flush=True)
    metrics = [metric for metric in opened.image if isinstance(metric, PairMetric)]
    rows = Rows(options.rows / (setup.rows or f"quality_{public_name(name)}.csv"))
    prompts = [line for path in PROMPTS for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = prompts[:: len(prompts) // (options.limit or setup.images)][: options.limit or setup.images]
    guidance = setup.guidance if options.guidance is None else options.guidance
    common = asdict(gather_facts(pipe.device, options.commit)) | {
        "model": public_name(name),
        "guidance": "" if guidance is None else f"{guidance:g}",
        "images": str(len(prompts)),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "weights": fingerprint(pipe),
        "blocks": str(count_blocks(model)),
        "lpips_weights": "".join(metric.source for metric in metrics if metric.name == "lpips"),
    }
    costs = StepCosts.load(setup.time_of)
    failed = 0
    for steps, wanted in plan(model, setup, options):
        common |= {"steps": str(steps), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        due = [(run, variant) for run, variant in wanted if not rows.has(row_of(run, variant, common))]
        if not due:
            continue
        requests = [ImageRequest(prompt, seed, steps, guidance) for seed, prompt in enumerate(prompts)]
        measurement = Measurement(pipe, requests, options.batch, metrics)
        known: dict[Variant, Row] = {}
        for run, variant in [*((REFERENCE, each) for each in UNMERGED), *due]:
            started = time.perf_counter()
            try:
                known[variant] = known.get(variant) or measurement.figures(variant)
            except Exception as error:  # one of hundreds: the others are worth more than its traceback
                if run == REFERENCE:
                    raise
                print(f"Failed: {name}, {steps} steps, {run}: {variant.title}: {error!r}", flush=True)
                failed += 1
                continue
            floor = known.get(UNMERGED[1], {})
            floors = {f"noise_floor_{figure}": floor.get(figure, "") for figure in ("psnr", "lpips")}
            row = row_of(run, variant, common) | floors | known[variant]
            row |= gain_of(row, costs)
            rows.add(row)
            figures = ", ".join(f"{each} {known[variant].get(each, '')}" for each in METRICS)
            figures += f"; gain: {note}" if (note := note_of(row, costs)) else ""
            took = time.perf_counter() - started
            print(f"{name}, {steps} steps, {run}: {variant.title}: {figures} ({took:.1f} s)", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given again; default: all demo models")
    parser.add_argument("--only", choices=RUNS[1:], action="append", help="this part; may be given again")
    parser.add_argument("--steps", default="", help="these numbers of steps, for all parts: 4,20")
    parser.add_argument("--gains", action="store_true", help="measure nothing: compute the gains of the rows again")
    parser.add_argument("--share", default="1/1", help="2/8: the second of eight processes that share the work")
    parser.add_argument("--guidance", type=float, help="default: that of the model")
    parser.add_argument("--changes", help="a field to set in all methods of merging: skip_blocks=(0,1)")
    parser.add_argument("--lpips-weights", type=Path)
    parser.add_argument("--rows", type=Path, default=FOLDER / "results", help="folder of the rows")
    parser.add_argument("--limit", type=int, help="so many prompts, spread evenly; default: by model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="")
    parser.add_argument("--commit", help="to record; default: that of the checkout")
    options = parser.parse_args()
    failed = 0
    for name in options.model or SETUPS:
        try:
            failed += measure(name, options) if not options.gains else write_gains(name, options)
        except UsageError as error:
            if options.model:
                raise SystemExit(f"Error: {error}") from error
            print(f"Left out: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
