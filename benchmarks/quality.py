"""What every setting costs in quality, on the demo models: the rows of benchmarks/results/quality_*.csv.

    python benchmarks/quality.py --lpips-weights FILE [--model bundled] [--only skip] [--steps 4,20] [--rows DIR]
    python benchmarks/quality.py --lpips-weights FILE --model FOLDER --setup bundled-video   # a model trained again
    python benchmarks/quality.py --lpips-weights FILE --model bundled --only skip --only lists --only solvers \\
        --only steps --only caches --steps 20 --images 4 --learned learned.json             # on a CPU

One process generates the same 32 images with every method and setting, in one batch each, and compares them with those
of the model as it is: presets and other methods, fewer steps and caches at all numbers of steps; then one setting after
another at few and at many steps. Every row is written as soon as it is measured. Killed, the same command goes on; rows
of another commit or machine are measured again. A method that a model cannot have is left out, with the reason. Rows of
a CPU are in files of their own.

Every row has two distances: to the pictures of the run's own number of steps, and to the converged ones of 100 steps.
The pictures of the model as it is are made once, and kept in the folder `local` next to the rows. The gain of what
saves whole steps is the number of steps by the number that was computed; that of merging is computed from measured
steps of a large model.

Clips of a video pipeline are compared frame by frame, and by their flicker. Their list of methods is another one: all
of them at 20 steps, those that a user would choose at 8 and at 50.

A small model leaves a GPU idle between launches. Several processes may share the work, and the file:

    for k in 1 2 3 4 5 6 7 8; do python benchmarks/quality.py --share $k/8 ... & done; wait
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock
from PIL.Image import Image
from toma_lab.evaluation import NOISE_FLOOR, Variant
from toma_lab.evaluation.run import applied, fitted
from toma_lab.evaluation.variants import (
    PAPER,
    UNMERGED,
    VariantSpec,
    count_blocks,
    mixes_images,
    paper_variants,
    variants_of,
)
from toma_lab.experiments.cells import MethodSpec
from toma_lab.experiments.costs import StepCosts
from toma_lab.experiments.facts import Facts, gather_facts
from toma_lab.experiments.parsing import numbers
from toma_lab.experiments.shortcuts import SHORTCUTS
from toma_lab.experiments.shortcuts.base import written
from toma_lab.experiments.shortcuts.skipped import SkippedSteps
from toma_lab.metrics import Weights, open_metrics
from toma_lab.metrics.base import PairMetric, to_pixels
from toma_lab.metrics.clips import flicker
from toma_lab.metrics.pixels import pool_psnr
from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name
from toma_lab.pipelines.clips import Clip, ClipRequest, generate
from toma_lab.pipelines.generation import ImageRequest, makes_clips
from torch import Tensor

from toma_diffusion import PRESETS, Skip, ToMAConfig
from toma_diffusion.api import find_denoiser, find_denoisers
from toma_diffusion.errors import UsageError
from toma_diffusion.files import check_writable, replacing
from toma_diffusion.others import config_class, named_config
from toma_diffusion.skip.levels import Levels, read_levels
from toma_diffusion.skip.schedule import computed_steps

FOLDER = Path(__file__).parent
PROMPTS = (FOLDER / "quality_prompts.txt", FOLDER / "quality_unseen_prompts.txt")
"""16 by which settings were chosen at an earlier stage, and 16 others. Prompt number n has seed n."""
CLIP_PROMPTS = (FOLDER / "quality_clip_prompts.txt",)
METRICS = ("psnr", "ssim", "lpips")
CONVERGED, CONVERGED_STEPS = "lpips_converged", 100
"""LPIPS to the picture of so many steps."""
FLICKER = "flicker"
"""Of clips, besides the others, which are means over all frames."""
FRAMES_AT_ONCE = 64
"""How many images or frames are compared together."""
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
SKIPPING = ("balanced", "fast", "faster")
"""The presets that skip steps."""
COMPUTED_STEPS = "computed steps"
"""Where the gain of what saves whole steps comes from."""
BOX, WITHIN_FRAMES, LONG_BOX = (4, 256), (1, 256), (16, 256)
"""Frames and tokens of a region of a clip: as by default, inside a frame, and over all frames of the small model."""


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
    batch: int = 32
    """Images or clips of one call."""
    prompts: tuple[Path, ...] = PROMPTS
    size: tuple[int, int] | None = None
    """Width and height of clips. None, as for `frames`: those of the pipeline."""
    frames: int | None = None
    has_converged: bool = True
    """Whether more steps make better pictures. Not those of a model that was trained for few."""

    def request(self, prompt: str, seed: int, steps: int, *, clip: bool) -> ImageRequest:
        """One image or clip."""
        if not clip:
            return ImageRequest(prompt, seed, steps, self.guidance)
        width, height = self.size or (None, None)
        return ClipRequest(prompt, seed, steps, self.guidance, width, height, frames=self.frames)


SETUPS: Mapping[str, Setup] = {
    "bundled": Setup(guidance=4.0, rows="quality_bundled.csv"),
    "bundled-4step": Setup((4, 8), (4,), guidance=1.0, rows="quality_4step.csv", has_converged=False),
    # The defaults of Flux leave the first five blocks of either kind alone, which are most of a small model's.
    # Its images cannot be merged in batches, so that there are fewer.
    "bundled-flux": Setup(guidance=4.0, images=16, time_of="flux", changes="skip_blocks=()", rows="quality_flux.csv"),
    # Those of Wan leave an eighth of the blocks alone, which of eight would be the first.
    # 20 steps come first: they have most rows. Eight clips, because the noise floor needs whole attention matrices: it
    # takes six times as long as the model as it is.
    "bundled-video": Setup(
        (20, 8, 50),
        (20,),
        guidance=4.0,
        images=16,
        time_of="wan-480p",
        changes="skip_blocks=()",
        rows="quality_video.csv",
        batch=8,
        prompts=CLIP_PROMPTS,
    ),
}


@dataclass(frozen=True)
class Conditions:
    """What the list of methods depends on."""

    steps: int
    has_guidance: bool
    is_sweep: bool = True
    """Whether all settings are tried at this number of steps. Otherwise only what a user would choose between."""
    computed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Which steps each preset computes."""
    learned: tuple[str, ...] = ()
    """Files of what was learned on the model."""

    @property
    def counts(self) -> list[int]:
        """How many steps the presets compute."""
        return sorted({len(steps) for steps in self.computed.values()} - {self.steps}, reverse=True)


@dataclass(frozen=True)
class Part:
    """Methods that are measured together."""

    methods: Callable[[Conditions], list[str]]
    ratios: tuple[float, ...] = HALF
    at_all_steps: bool = False


def fewer(steps: int) -> list[int]:
    """Numbers of steps that save 1.15 to 2.5 times, as near as whole numbers come."""
    return sorted({round(steps / gain) for gain in GAINS} - {0, steps}, reverse=True)


def skip(at: Conditions) -> list[str]:
    """The presets that skip steps, as they are and with what was learned on the model."""
    return [*SKIPPING, *(f"{preset}:learned={file}" for file in at.learned for preset in SKIPPING)]


def lists(at: Conditions) -> list[str]:
    """The plain solver on the steps that the presets compute."""
    return [f"timesteps:computed={written(steps)}" for steps in at.computed.values() if len(steps) < at.steps]


def solvers(at: Conditions) -> list[str]:
    """Better solvers with as many steps as the presets compute: as usually spaced, on the published lists, and DPM++ on
    the presets' own steps."""
    return [
        *(f"solver:name={name};steps={count}" for name in ("dpmpp-2m", "unipc") for count in at.counts),
        *(f"solver:name=dpmpp-2m;steps={count};spacing=ays" for count in at.counts),
        *(f"solver:name=dpmpp-2m;computed={written(steps)}" for steps in at.computed.values() if len(steps) < at.steps),
    ]


def of_cache_dit(at: Conditions) -> list[str]:
    """DBCache with one block computed, alone and with each calibrator; and the step masks. The package's own number of
    warm-up steps is for 50."""
    cache = f"cache-dit:F=1;B=0;max_warmup_steps={max(1, min(8, at.steps // 5))}"
    taylor = "calibrator=taylorseer;taylorseer_order=1"
    masks = ("medium", "fast", "ultra")
    return [
        *(f"{cache};R={threshold}" for threshold in (0.1, 0.2, 0.35, 0.6)),
        *(f"{cache};R={threshold};{taylor};max_continuous_cached_steps=3" for threshold in (0.2, 0.35)),
        *(f"{cache};R=0.35;calibrator={name}" for name in ("foca", "dmd")),
        *(f"cache-dit:F=1;B=0;steps_mask={mask};steps_computation_policy=static" for mask in masks),
        *(f"cache-dit:F=1;B=0;steps_mask={mask};steps_computation_policy=static;{taylor}" for mask in masks),
    ]


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
        *(f"seacache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *of_cache_dit(at),
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


def region(frames: int, tokens: int, *changes: str) -> str:
    """`toma-stage` in regions of so many frames and tokens."""
    return ";".join([f"toma-stage:region_frames={frames}", f"region_tokens={tokens}", *changes])


def clip_caches(at: Conditions) -> list[str]:
    """Those that diffusers has for video transformers. Clips with the first-block cache are made one by one.

    TaylorSeer only in its lite mode: in the other one diffusers 0.42 finds no attention in Wan, and changes nothing.
    """
    lite = "use_lite_mode=True"
    essential = ["first-block-cache:threshold=0.2", f"taylorseer:cache_interval=2;{lite}", "magcache:threshold=0.06"]
    return essential + at.is_sweep * [
        *(f"first-block-cache:threshold={threshold}" for threshold in (0.1, 0.4)),
        *(f"taylorseer:cache_interval={interval};{lite}" for interval in (3, 5) if interval < at.steps),
        "magcache:threshold=0.12",
        *(f"seacache:threshold={threshold}" for threshold in (0.1, 0.2, 0.4)),
        *of_cache_dit(at),
    ]


def boxes(at: Conditions) -> list[str]:
    """Regions of all shapes. A frame of the small model has 256 tokens, so that no more fit inside one."""
    shapes = [(frames, tokens) for frames in (1, 2, 4, 8, 16) for tokens in (64, 256, 1024)]
    return [region(frames, tokens) for frames, tokens in shapes if tokens <= 256 * frames]


def nearness(at: Conditions) -> list[str]:
    """How much near tokens are preferred in time, and in both."""
    weights = (0, 0.1, 0.3, 1)
    return [
        *(region(*box, f"frame_weight={weight}") for box in (BOX, LONG_BOX) for weight in weights),
        *(region(*box, f"distance_weight={weight}") for box in (WITHIN_FRAMES, BOX) for weight in weights),
    ]


def whole_blocks(at: Conditions) -> list[str]:
    """Blocks that are left whole."""
    return [f"toma-stage:skip_blocks={blocks}" for blocks in ("()", "(0,)", "(-1,)", "(0,-1)")]


AT_EQUAL_COST: Mapping[str, Part] = {
    "skip": Part(skip, at_all_steps=True),
    "lists": Part(lists, at_all_steps=True),
    "solvers": Part(solvers, at_all_steps=True),
    "steps": Part(lambda at: [f"steps:{count}" for count in at.counts], at_all_steps=True),
    "fewer steps": Part(lambda at: [f"steps:{number}" for number in fewer(at.steps)], at_all_steps=True),
}
"""What saves whole steps. The last with more numbers of steps, to compare merging with."""
PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "caches": Part(caches, at_all_steps=True),
    "presets": Part(
        lambda at: [
            *("toma-late", "toma-stage", BEFORE, "toma", "toma:scale=1000", "toma-stripe", "toma-tile", "toma-once"),
            *("tomesd", "tofu", "todo"),
        ],
        RATIOS,
        at_all_steps=True,
    ),
    "combined": Part(combined, (0.25, 0.5)),
    "regions": Part(regions),
    "distances": Part(distances),
    "guidance": Part(guidance, RATIOS),
    "attention": Part(attention, RATIOS),
    "where and when": Part(where_and_when),
    "sharing": Part(sharing),
}
CLIP_PARTS: Mapping[str, Part] = {
    **AT_EQUAL_COST,
    "presets": Part(
        lambda at: ["toma-stage", "toma-late", *at.is_sweep * ["toma-tile", "toma"]], RATIOS, at_all_steps=True
    ),
    "frames": Part(lambda at: [region(*box) for box in (WITHIN_FRAMES, BOX, LONG_BOX)], RATIOS, at_all_steps=True),
    "caches": Part(clip_caches, at_all_steps=True),
    "boxes": Part(boxes),
    "nearness": Part(nearness),
    "whole blocks": Part(whole_blocks),
}
"""Of a model of clips."""
REFERENCE = "reference"
"""The part with the model as it is, which is always there, and its noise floor, unless only other parts are asked
for."""
RUNS = (REFERENCE, *dict.fromkeys((*PARTS, *CLIP_PARTS)), *PAPER)
"""All parts. The tables of the paper only if they are asked for, at 20 steps."""
STEPS_OF_THE_PAPERS_TABLES = 20
SETTINGS = tuple(field.name for field in fields(ToMAConfig))
COLUMNS = (
    *("run", "model", "steps", "guidance", "title", "method", "changed", "shortcuts", "skipped", "computed", *SETTINGS),
    *("images", "frames", *METRICS, CONVERGED, FLICKER, "seconds"),
    *("gain", "gain_source", "blocks", "variant"),
    *("resolution", "dtype", "weights", "lpips_weights", *(field.name for field in fields(Facts)), "date"),
)
OF_OWN_IMAGES = ("model", "guidance", "dtype", "weights", "gpu", "torch", "diffusers")
"""Columns that the images of the model as it is depend on."""
SAME = ("images", "guidance", "dtype", "weights", *(field.name for field in fields(Facts)))
"""Columns in which a row has to agree with this run, or it is measured again."""
Row = dict[str, str]


class Rows:
    """The rows of a model in their file."""

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self.path = path
        self.rows = self._read()

    def has(self, row: Row, *, converged: bool) -> bool:
        """Whether it was measured by this commit on this machine, and compared with converged pictures if it must."""
        held = self.rows.get(self._key(row))
        if held is None or (converged and not held[CONVERGED]):
            return False
        return all(held[name] == row[name] for name in SAME)

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


@dataclass(frozen=True)
class Own:
    """What a model makes as it is."""

    images: Tensor
    """[B, frames, 3, height, width], 0 to 1. An image has one frame."""
    seconds: float
    """For one of them."""
    passes: float
    """Calls of the denoisers in a step."""


class OwnImages:
    """What a model makes as it is, in files that processes and later runs share.

    Args:
        folder: of the files.
        facts: what the images depend on besides the request.
    """

    def __init__(self, folder: Path, pipe: Any, batch: int, facts: Mapping[str, str]) -> None:
        self.folder, self.pipe, self.batch, self.facts = folder, pipe, batch, facts

    def of(self, requests: Sequence[ImageRequest]) -> Own:
        """Those of these requests. What is missing is made."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{requests[0].steps}.lock"):
            missing = [request for request in requests if not self._path(request).exists()]
            for start in range(0, len(missing), self.batch):
                self._make(missing[start : start + self.batch])
        found = [torch.load(self._path(request), weights_only=True) for request in requests]
        images = torch.stack([each["image"] for each in found]).to(self.pipe.device) / 255
        return Own(images, fmean(each["seconds"] for each in found), found[0]["passes"])

    def _make(self, requests: list[ImageRequest]) -> None:
        started = time.perf_counter()
        with counted_calls(self.pipe) as calls:
            made = generate(self.pipe, requests)
        seconds = (time.perf_counter() - started) / len(requests)
        for request, image in zip(requests, made, strict=True):
            values = {
                "image": (frames_of(image) * 255).round().byte(),
                "seconds": seconds,
                "passes": len(calls) / request.steps,
            }
            with replacing(self._path(request), "wb") as file:
                torch.save(values, file)

    def _path(self, request: ImageRequest) -> Path:
        text = json.dumps([dict(self.facts), {name: str(value) for name, value in vars(request).items()}])
        return self.folder / f"{request.steps}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt"


@contextmanager
def counted_calls(pipe: Any) -> Iterator[list[None]]:
    """A list that grows by one with every call for which a denoiser runs. In skipped steps it does not."""
    calls: list[None] = []
    hooks = [
        model.register_forward_pre_hook(lambda module, given: calls.append(None)) for model in find_denoisers(pipe)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(eq=False)
class Measurement:
    """One model at one number of steps."""

    pipe: Any
    requests: list[ImageRequest]
    batch: int
    metrics: list[PairMetric]
    own: Own
    converged: Own | None = None

    def figures(self, variant: Variant) -> Row:
        """Of one variant: metrics, computed and skipped steps, seconds for an image (the first of their kind, with
        whatever has to be compiled)."""
        if not variant.saves_time and variant.name != NOISE_FLOOR:
            return self._row(self.own.images, self.own.seconds, len(self.own.images), self._steps)
        requests = [replace(each, steps=variant.requested_steps(self._steps)) for each in self.requests]
        ready = fitted(self.pipe, variant, requests[0], self._steps)
        batch = 1 if mixes_images(find_denoiser(self.pipe), variant) else self.batch
        images: list[Tensor] = []
        is_cached = any(shortcut.is_cache for shortcut in variant.shortcuts)
        watching = SkippedSteps.by(variant.shortcuts, self.pipe) if is_cached else nullcontext()
        started = time.perf_counter()
        with watching, counted_calls(self.pipe) as calls:
            for start in range(0, len(requests), batch):
                with applied(self.pipe, ready, self._steps):
                    images += map(frames_of, generate(self.pipe, requests[start : start + batch]))
        seconds = (time.perf_counter() - started) / len(images)
        skipped = watching.share if isinstance(watching, SkippedSteps) else 0.0
        computed = len(calls) / -(-len(requests) // batch) / self.own.passes * (1 - skipped)
        return self._row(torch.stack(images).to(self.pipe.device), seconds, len(images), computed, skipped)

    @property
    def _steps(self) -> int:
        return self.requests[0].steps

    def _row(self, images: Tensor, seconds: float, count: int, computed: float, skipped: float = 0.0) -> Row:
        return {
            "images": str(count),
            "seconds": f"{seconds:.4f}",
            "computed": f"{computed:.4g}",
            "skipped": f"{skipped:.4f}" if skipped else "",
            "resolution": f"{images.shape[-1]}x{images.shape[-2]}",
            "frames": str(images.shape[1]) if isinstance(self.requests[0], ClipRequest) else "",
        } | self._scores(images)

    @torch.no_grad()
    def _scores(self, images: Tensor) -> Row:
        scores: Row = {}
        if images is not self.own.images:
            for metric in self.metrics:
                values = distances_of(metric, images, self.own.images)
                scores[metric.name] = f"{pool_psnr(values) if metric.name == 'psnr' else fmean(values):.6g}"
            if images.shape[1] > 1:
                scores[FLICKER] = f"{flicker(images, self.own.images).mean().item():.6g}"
        for metric in self.metrics:
            if self.converged is not None and metric.name == "lpips":
                scores[CONVERGED] = f"{fmean(distances_of(metric, images, self.converged.images)):.6g}"
        return scores


def distances_of(metric: PairMetric, images: Tensor, references: Tensor) -> list[float]:
    """Frame by frame."""
    pairs = [each.flatten(0, 1).split(FRAMES_AT_ONCE) for each in (images, references)]
    found: list[float] = torch.cat([metric.distances(*pair) for pair in zip(*pairs, strict=True)]).tolist()
    return found


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
    return read_levels(pipe.scheduler, 0, request.steps, model_name=type(find_denoiser(pipe)).__name__)


def computed_by_presets(pipe: Any, request: ImageRequest) -> dict[str, tuple[int, ...]]:
    """Which steps of such a generation each preset computes."""
    levels = levels_of(pipe, request)
    settings = {preset: PRESETS[preset].skip for preset in SKIPPING}
    return {
        preset: computed_steps(each, request.steps, levels)
        for preset, each in settings.items()
        if isinstance(each, Skip)
    }


def frames_of(made: Image | Clip) -> Tensor:
    """[frames, 3, height, width], 0 to 1; an image is one frame."""
    return torch.cat([to_pixels(frame) for frame in (made.frames if isinstance(made, Clip) else (made,))])


def methods_of(part: Part, at: Conditions, changes: str) -> list[str]:
    """The methods of a part, with the changes that the model needs."""
    given = changes.partition("=")[0]
    methods = []
    for text in part.methods(at):
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


def variants_at(part: Part, pipe: Any, at: Conditions, changes: str) -> tuple[list[Variant], list[str]]:
    """The variants of a part, and a reason for each that is not possible on this pipeline."""
    variants: dict[Variant, None] = {}
    left_out = []
    for text in methods_of(part, at, changes):
        try:
            found = variants_of(pipe, [VariantSpec.parse(text)], part.ratios)
            for variant in found:
                check_steps(variant, at.steps)
            variants |= dict.fromkeys(map(as_used, found))
        except UsageError as error:
            left_out.append(f"{text}: {error}")
    return list(variants), left_out


def check_steps(variant: Variant, steps: int) -> None:
    """Raise `UsageError` if a variant is not possible with so many steps."""
    variant.steps_of(steps)
    learned = None if variant.config is None or variant.config.skip is None else variant.config.skip.learned
    if learned is not None and learned.num_steps != steps:
        raise UsageError(f"it was learned with {learned.num_steps} steps, and this run has {steps}.")


def as_used(variant: Variant) -> Variant:
    """With what was learned for its own number of computed steps, without that for others."""
    skip = None if variant.config is None else variant.config.skip
    if variant.config is None or skip is None or skip.learned is None:
        return variant
    used = replace(skip.learned, steps=(skip.learned.of(skip.count(skip.learned.num_steps)),))
    return replace(variant, config=replace(variant.config, skip=replace(skip, learned=used)))


def row_of(run: str, variant: Variant, common: Row) -> Row:
    """What is known before anything is generated."""
    config = {} if variant.config is None else variant.config.to_dict()
    if config.get("skip") and config["skip"]["learned"]:
        config["skip"] |= {"learned": True}  # the weights are in the column `variant`
    return (
        dict.fromkeys(COLUMNS, "")
        | common
        | {name: str(config.get(name, "")) for name in SETTINGS}
        | {"run": run, "title": variant.title, "method": variant.key["method"]}
        | {"changed": "; ".join(variant.changes.values())}
        | {"variant": json.dumps(variant.to_dict(), separators=(",", ":"))}
        | {"shortcuts": "+".join(shortcut.text for shortcut in variant.shortcuts)}
    )


def gain_of(row: Row, costs: StepCosts) -> Row:
    """How many times fewer steps are computed. Of what merges tokens: how many times faster it would be on the large
    model; empty if that has not been measured."""
    variant, steps = Variant.from_dict(json.loads(row["variant"])), int(row["steps"])
    if variant.name == NOISE_FLOOR:
        return {"gain": "", "gain_source": ""}
    skipped = float(row["skipped"] or 0)
    if not merges_at(variant, steps):
        computed = float(row["computed"] or variant.steps_of(steps) * (1 - skipped))  # older rows did not count
        return {"gain": f"{steps / computed:.4f}", "gain_source": COMPUTED_STEPS}
    gain = costs.gain(
        steps,
        preset=variant.name,
        config=variant.config,
        shortcuts=variant.shortcuts,
        cached=skipped,
        blocks=int(row["blocks"]),
    )
    return {"gain": "", "gain_source": ""} if gain is None else {"gain": f"{gain:.4f}", "gain_source": costs.model}


def merges_at(variant: Variant, steps: int) -> bool:
    """Whether it merges tokens in a generation of so many steps."""
    config = variant.config
    return config is not None and config.ratio > 0 and (config.max_steps is None or steps <= config.max_steps)


def note_of(row: Row, costs: StepCosts) -> str:
    """What its gain does not count; empty if it has none, or counts everything."""
    variant = Variant.from_dict(json.loads(row["variant"]))
    step = costs.step_of_preset(variant.name, variant.config)
    return step.note if row["gain"] and step is not None else ""


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
        return Rows(path.with_stem(f"{path.stem}_cpu") if device == "cpu" else path)

    def costs(self) -> StepCosts:
        """The measured steps of the large model. Without any, merging has no gain."""
        try:
            return StepCosts.load(self.setup.time_of)
        except UsageError as error:
            print(f"Left out: gains of {self.name}: {error}", flush=True)
            return StepCosts(self.setup.time_of, ())


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """The models that the user asks for, each with what is usual for it and what the user changes."""
    changes = {name: getattr(options, name) for name in ("changes", "guidance", "batch")}
    changes = {name: value for name, value in changes.items() if value is not None}
    jobs = []
    for model in options.model or ([options.setup] if options.setup else SETUPS):
        setup = SETUPS.get(options.setup or model, Setup())
        jobs.append(Job(model, options.setup or public_name(model), replace(setup, **changes)))
    return jobs


def write_gains(job: Job, options: argparse.Namespace) -> int:
    """Compute the gains of all rows of a model again, from the steps that have been measured by now. Nothing fails."""
    for device in ("cuda", "cpu"):
        rows = job.rows(options.rows, device)
        if rows.rows:
            costs = job.costs()
            rows.add(*(row | gain_of(row, costs) for row in rows.rows.values()))
    return 0


def share_of(text: str) -> tuple[int, int]:
    """`2/8` as two numbers."""
    found = numbers("share", text.replace("/", ","), int)
    if len(found) != 2 or not 1 <= found[0] <= found[1]:
        raise UsageError(f"share {text!r} is not allowed: give 2/8 for the second of eight.")
    return found[0], found[1]


Wanted = list[tuple[str, Variant]]
"""Variants with the names of their parts."""


def plan(pipe: Any, setup: Setup, options: argparse.Namespace) -> dict[int, Wanted]:
    """For every number of steps the variants that are this process's share. Says what is left out, once."""
    model, parts = find_denoiser(pipe), CLIP_PARTS if makes_clips(pipe) else PARTS
    planned: dict[int, Wanted] = {}
    said = set()
    for steps in numbers("steps", options.steps, int) or setup.steps:
        sweeps = bool(options.steps) or steps in setup.steps_of_sweeps
        at = Conditions(
            steps,
            setup.guidance is None or setup.guidance > 1,
            sweeps,
            computed_by_presets(pipe, setup.request("", 0, steps, clip=makes_clips(pipe))),
            tuple(options.learned or ()),
        )
        found: Wanted = []
        for run in options.only or (*parts, REFERENCE):
            if run == REFERENCE:
                variants, left_out = [UNMERGED[1]], list[str]()
            elif run in PAPER:
                is_due = options.steps or steps == STEPS_OF_THE_PAPERS_TABLES
                variants, left_out = paper_variants(model, run) if is_due else ([], [])
            elif run not in parts:
                variants, left_out = [], [f"a {type(pipe).__name__} has no such part."]
            else:
                is_due = sweeps or parts[run].at_all_steps
                variants, left_out = variants_at(parts[run], pipe, at, setup.changes) if is_due else ([], [])
            found += [(run, variant) for variant in variants]
            for reason in left_out:
                if reason not in said:
                    print(f"Left out: {run}: {reason}", flush=True)
                    said.add(reason)
        planned[steps] = shared(found, *share_of(options.share))
    return planned


def shared(wanted: Wanted, number: int, count: int) -> Wanted:
    """One of `count` shares. A variant of several parts is in one share, where it is generated once."""
    mine = {*[*dict.fromkeys(settings_alone(variant) for _, variant in wanted)][number - 1 :: count]}
    return [(run, variant) for run, variant in wanted if settings_alone(variant) in mine]


def settings_alone(variant: Variant) -> Variant:
    """The same whichever of its settings were asked for: two that are equal generate the same."""
    return replace(variant, overrides=())


def common_of(job: Job, pipe: Any, metrics: list[PairMetric], images: int, commit: str | None) -> Row:
    """What all rows of this run have."""
    guidance = job.setup.guidance
    return asdict(gather_facts(pipe.device, commit)) | {
        "model": job.name,
        "guidance": "" if guidance is None else f"{guidance:g}",
        "images": str(images),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "weights": fingerprint(pipe),
        "blocks": str(count_blocks(find_denoiser(pipe))),
        "lpips_weights": "".join(metric.source for metric in metrics if metric.name == "lpips"),
    }


def measure(job: Job, options: argparse.Namespace) -> int:
    """Everything that is missing for one model. Returns how many variants failed."""
    setup = job.setup
    pipe: Any = load_pipeline(job.model, options.device or None)
    opened = open_metrics(METRICS, Weights(lpips=options.lpips_weights), pipe.device)
    for reason in opened.missing:
        print(f"Left out: {reason}", flush=True)
    metrics = [metric for metric in opened.image if isinstance(metric, PairMetric)]
    rows, costs = job.rows(options.rows, pipe.device.type), job.costs()
    prompts = prompts_of(setup)[: options.images]
    common = common_of(job, pipe, metrics, len(prompts), options.commit)
    own = OwnImages(
        options.rows / "local" / job.name, pipe, setup.batch, {name: common[name] for name in OF_OWN_IMAGES}
    )
    planned = plan(pipe, setup, options)
    for steps, wanted in planned.items():
        count = len({settings_alone(variant) for _, variant in wanted})
        print(f"{job.name}, {steps} steps: {len(wanted)} rows of {count} variants", flush=True)
    failed = 0
    wants_converged = setup.has_converged and options.converged and any(metric.name == "lpips" for metric in metrics)
    for steps, wanted in planned.items():
        common |= {"steps": str(steps), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        due = [
            (run, variant)
            for run, variant in wanted
            if not rows.has(row_of(run, variant, common), converged=wants_converged)
        ]
        if not due:
            continue
        requests = [setup.request(prompt, seed, steps, clip=makes_clips(pipe)) for seed, prompt in enumerate(prompts)]
        converged = [replace(request, steps=CONVERGED_STEPS) for request in requests] if wants_converged else []
        measurement = Measurement(
            pipe, requests, setup.batch, metrics, own.of(requests), own.of(converged) if converged else None
        )
        failed += measure_all(due, measurement, common, rows, costs)
    return failed


def prompts_of(setup: Setup) -> list[str]:
    """Those of a setup, spread evenly over its files."""
    prompts = [line for path in setup.prompts for line in path.read_text(encoding="utf-8").splitlines()]
    count = min(setup.images, len(prompts))
    return prompts[:: len(prompts) // count][:count]


def measure_all(due: Wanted, measurement: Measurement, common: Row, rows: Rows, costs: StepCosts) -> int:
    """The model as it is, and what is due at one number of steps. Returns how many failed."""
    known: dict[Variant, Row] = {}
    failed = 0
    for run, variant in [(REFERENCE, UNMERGED[0]), *due]:
        started, settings = time.perf_counter(), settings_alone(variant)
        about = f"{common['model']}, {common['steps']} steps, {run}: {variant.title}"
        try:
            known[settings] = known.get(settings) or measurement.figures(variant)
        except Exception as error:  # one of hundreds: the others are worth more than its traceback
            print(f"Failed: {about}: {error!r}", flush=True)
            failed += 1
            continue
        row = row_of(run, variant, common) | known[settings]
        row |= gain_of(row, costs)
        rows.add(row)
        shown = ("gain", *METRICS, CONVERGED, FLICKER)
        figures = ", ".join(f"{each} {row[each]}" for each in shown if row[each])
        figures += f"; gain: {note}" if (note := note_of(row, costs)) else ""
        print(f"{about}: {figures} ({time.perf_counter() - started:.1f} s)", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="may be given again; default: all demo models")
    parser.add_argument("--setup", choices=SETUPS, help="what is usual for this model, whose name is in the rows")
    parser.add_argument("--only", choices=RUNS, action="append", help="this part; may be given again")
    parser.add_argument("--steps", default="", help="these numbers of steps, for all parts: 4,20")
    parser.add_argument("--gains", action="store_true", help="measure nothing: compute the gains of the rows again")
    parser.add_argument("--share", default="1/1", help="2/8: the second of eight processes that share the work")
    parser.add_argument("--guidance", type=float, help="default: that of the model")
    parser.add_argument("--changes", help="a field to set in all methods of merging: skip_blocks=(0,1)")
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
    parser.add_argument("--batch", type=int, help="images or clips of one call; default: by model")
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
