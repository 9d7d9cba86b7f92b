"""Between a chosen candidate and the file `tuned.json`."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from PIL import Image

from toma_diffusion.merge.base import Config
from toma_diffusion.others import method_of
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.schedule import computed_steps
from toma_diffusion.tuned import ClipSize, Tuned
from toma_lab.evaluation.plan import BASELINE, Variant
from toma_lab.experiments.shortcuts import shortcut_from_dict
from toma_lab.pipelines.generation import read_settings
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.measure import ORIGINAL
from toma_lab.tune.outcome import Outcome

NOTHING = "none"
"""The method of the model as it is."""


def to_file(folder: TuneFolder, outcome: Outcome) -> Tuned:
    """The file of what was chosen."""
    plan, facts = folder.plan, folder.facts
    variant = outcome.chosen.variant if outcome.chosen else None
    measured: dict[str, Any] = {"goal": str(outcome.goal), "is_reached": outcome.is_reached}
    if outcome.chosen is not None and outcome.chosen.figures is not None:
        figures = outcome.chosen.figures
        measured |= {
            "speed_up": round(figures.speed_up, 4),
            "lpips": None if figures.lpips is None else round(figures.lpips, 5),
            "psnr": round(figures.psnr, 3) if isfinite(figures.psnr) else str(figures.psnr),
            "prompts": figures.images,
        }
        measured |= {} if figures.flicker is None else {"flicker": round(figures.flicker, 4)}
    versions = {name: value for name, value in asdict(facts).items() if name != "gpu"}
    measured |= {"model": plan.model, "device": facts.gpu, "dtype": plan.dtype, "compile": plan.compile}
    measured |= {"versions": versions, "date": folder.date}
    return Tuned(
        plan.model_class,
        plan.steps,
        NOTHING if variant is None else variant.name,
        None if variant is None else variant.config,
        () if variant is None else tuple(each.to_dict() for each in variant.shortcuts),
        measured,
        clip_size(folder),
    )


def clip_size(folder: TuneFolder) -> ClipSize | None:
    """The clips of a search as they were made; None if it is one of images."""
    plan = folder.plan
    if not plan.clips:
        return None
    paths = (folder.image_path(ORIGINAL, item) for item in plan.items)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return ClipSize(plan.frames, plan.width, plan.height)
    with Image.open(path) as file:
        return ClipSize(read_settings(path)["frames"], *file.size)


def from_file(tuned: Tuned) -> Variant:
    """What `toma generate` applies."""
    shortcuts = tuple(shortcut_from_dict(each) for each in tuned.shortcuts)
    return Variant(BASELINE if tuned.method == NOTHING else tuned.method, tuned.config, shortcuts=shortcuts)


def merges(variant: Variant, steps: int) -> bool:
    """Whether tokens are merged in generations of so many steps."""
    config = variant.config
    return config is not None and config.ratio > 0 and (config.max_steps is None or steps <= config.max_steps)


def skips(variant: Variant, steps: int) -> bool:
    """Whether any of so many steps is skipped."""
    skip = None if variant.config is None else variant.config.skip
    return skip is not None and skip.count(steps) < steps


def in_sentences(variant: Variant, steps: int) -> list[str]:
    """A setting in words."""
    config, sentences = variant.config, list[str]()
    left = variant.steps_of(steps)
    if config is not None and merges(variant, left):
        sentences += [_sentence(line) for line in _merging(config)]
    if config is not None and config.skip is not None and skips(variant, left):
        sentences.append(_computed(config.skip, left))
        weights = "" if config.skip.learned is None else ", with weights that were learned on the model"
        sentences.append(f"In the others the model does not run: its output is predicted{weights}.")
    sentences += [shortcut.sentence(steps) for shortcut in variant.shortcuts]
    return sentences or ["Nothing is changed: the model as it is."]


def _computed(skip: Skip, steps: int) -> str:
    """Which of so many steps are computed."""
    count = f"{skip.count(steps)} of {steps} steps are computed"
    if skip.learned is None and not isinstance(skip.computed, tuple):
        return f"{count}, spread by the noise levels of the scheduler."
    return f"{count}: {', '.join(map(str, computed_steps(skip, steps)))}, from 0."


def _merging(config: Config) -> list[str]:
    where = {"module": "around every layer", "block": "around every block", "stage": "around every run of blocks"}
    lines = [f"{config.ratio:.0%} of the tokens are removed by merging ({config.label}), {where[config.scope]}"]
    start, end = config.window
    if (start, end) != (0.0, 1.0):
        lines.append(f"they are merged from {start:.0%} to {end:.0%} of the steps, and in no others")
    if config.skip_blocks:
        lines.append(f"these blocks are left whole: {', '.join(map(str, config.skip_blocks))}")
    return lines + method_of(config).describe(config)


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:].rstrip('.')}."
