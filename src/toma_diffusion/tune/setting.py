"""Between a chosen candidate and the file `tuned.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from toma_diffusion.evaluation.plan import BASELINE, Variant
from toma_diffusion.experiments.shortcuts import FewerSteps, shortcut_from_dict
from toma_diffusion.methods import method_of
from toma_diffusion.tune.folder import TuneFolder
from toma_diffusion.tune.outcome import Outcome
from toma_diffusion.tuned import Tuned

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
    )


def from_file(tuned: Tuned) -> Variant:
    """What `toma generate` applies."""
    shortcuts = tuple(shortcut_from_dict(each) for each in tuned.shortcuts)
    return Variant(BASELINE if tuned.method == NOTHING else tuned.method, tuned.config, shortcuts=shortcuts)


def in_sentences(variant: Variant, steps: int) -> list[str]:
    """A setting in words."""
    sentences: list[str] = []
    if variant.config is not None:
        sentences += _merging(variant)
    for shortcut in variant.shortcuts:
        if isinstance(shortcut, FewerSteps):
            sentences.append(f"{shortcut.steps} steps are taken in place of {steps}.")
        else:
            settings = ", ".join(f"{name}={value}" for name, value in shortcut.settings.items())
            sentences.append(f"The cache {shortcut.name} is on ({settings}): it skips what changes little.")
    return sentences or ["Nothing is changed: the model as it is."]


def _merging(variant: Variant) -> Sequence[str]:
    config = variant.config
    assert config is not None
    sentences = []
    if config.ratio and variant.name != "reuse":
        where = {"module": "around every layer", "block": "around every block", "stage": "around every run of blocks"}
        sentences.append(
            f"{config.ratio:.0%} of the tokens are removed by merging ({config.label}, {variant.name}), "
            f"{where.get(config.scope, config.scope)}."
        )
        start, end = config.window
        if (start, end) != (0.0, 1.0):
            sentences.append(f"They are merged from {start:.0%} to {end:.0%} of the steps, and in no others.")
        if config.skip_blocks:
            sentences.append(f"These blocks are left whole: {', '.join(map(str, config.skip_blocks))}.")
        sentences += [_sentence(line) for line in method_of(config).describe(config)]
    reuse = config.to_dict().get("reuse")
    if reuse:
        start, end = reuse["start"], reuse["end"]
        sentences.append(
            f"One step in {reuse['period']} is computed; in the others, {_reused(reuse['part'])} are not computed, and "
            f"what they changed before is used again{' in a straight line' if reuse['order'] else ''}."
        )
        sentences.append(f"The first {start:.0%} and the last {end:.0%} of the steps are all computed.")
    return sentences


def _reused(part: str) -> str:
    return "all parts below the first level" if part == "deep" else "the transformer blocks"


def _sentence(line: str) -> str:
    return re.sub(r"^.", lambda first: first[0].upper(), line.strip()).rstrip(".") + "."
