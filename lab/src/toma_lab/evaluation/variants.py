"""Makes the variants of a run from methods and ratios, or from the name of a table in the paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from toma_diffusion.api import find_denoiser
from toma_diffusion.errors import UsageError
from toma_diffusion.families import find_family
from toma_lab.evaluation.plan import BASELINE, NOISE_FLOOR, Variant
from toma_lab.experiments.cells import MethodSpec, cells_of
from toma_lab.experiments.shortcuts import Shortcut, parse_shortcut, shortcut_class

RATIOS = (0.25, 0.5, 0.75)
UNMERGED = (Variant(BASELINE), Variant(NOISE_FLOOR))
"""The first two variants of every run."""

_TOMA = "toma:scale=1000"
"""With the paper's softmax; our preset uses hard assignment."""
_EVERY_STEP = "select_every=1;reweigh_every=1"
PAPER: Mapping[str, tuple[tuple[tuple[str, ...], tuple[float, ...]], ...]] = MappingProxyType(
    {
        # Table 2, selection: at random, and by facility location among all tokens, in stripes and in tiles.
        "table2": (
            (
                (
                    f"{_TOMA};selection=random;region=global",
                    f"{_TOMA};selection=facility-location;region=global",
                    f"{_TOMA};selection=facility-location;region=stripe",
                    f"{_TOMA};selection=facility-location;region=tile",
                ),
                (0.5,),
            ),
        ),
        # Table 3, the number of tiles. "50 recompute steps" of 50: everything computed again in every step.
        "table3": ((tuple(f"{_TOMA};num_regions={count};{_EVERY_STEP}" for count in (4, 16, 64, 256)), (0.5,)),),
        # Table 6, unmerging, under the same conditions.
        "table6": ((tuple(f"{_TOMA};unmerge={how};{_EVERY_STEP}" for how in ("transpose", "pseudo-inverse")), (0.5,)),),
        # Table 7, how often destinations and weights are computed. The paper chooses 10 and 5.
        "table7": (
            (
                tuple(
                    f"{_TOMA};select_every={select};reweigh_every={reweigh}"
                    for select, reweigh in ((1, 1), (10, 1), (10, 5), (10, 10))
                ),
                (0.5,),
            ),
        ),
        # Table 9, all methods. ToDo has one ratio only.
        "table9": (
            ((_TOMA, "toma-stripe", "toma-tile", "toma-once", "tomesd", "tofu"), RATIOS),
            (("todo",), (0.75,)),
        ),
        # Table 10, Flux. Defaults of the model family, such as blocks to skip, are filled in.
        "table10": (((_TOMA,), RATIOS),),
    }
)
"""The rows of the paper's tables: methods with their settings, and the ratios of each.

The text of the paper that we have contains the captions and the discussion, but the values of Table 10 only. Rows that
are not spelled out follow the discussion."""


@dataclass(frozen=True)
class VariantSpec:
    """What a user asks for: a method of merging, shortcuts, or both."""

    merging: MethodSpec | None
    shortcuts: tuple[Shortcut, ...] = ()

    @classmethod
    def parse(cls, text: str) -> VariantSpec:
        """`fast:num_regions=256`, `steps:14`, or `fast+steps:14`."""
        parts = re.split(r"\+(?=[A-Za-z])", text.strip())  # not that of scale=1e+3
        is_shortcut = [shortcut_class(part) is not None for part in parts]
        merging = [MethodSpec.parse(part) for part, known in zip(parts, is_shortcut, strict=True) if not known]
        shortcuts = [parse_shortcut(part) for part, known in zip(parts, is_shortcut, strict=True) if known]
        caches = [shortcut.name for shortcut in shortcuts if shortcut.is_cache]
        for several, what in (
            ([each.preset for each in merging], "methods of merging"),
            (caches, "caches"),
            ([each.text for each in shortcuts if not each.is_cache], "numbers of steps"),
        ):
            if len(several) > 1:
                raise UsageError(f"method {text!r} has several {what}, {' and '.join(several)}: leave one.")
        return cls(merging[0] if merging else None, tuple(shortcuts))

    def impossible(self, ratios: Iterable[float]) -> list[str]:
        """A sentence for each of the ratios that the method of merging cannot have."""
        return [] if self.merging is None else self.merging.impossible(ratios)


def variants_of(pipe_or_model: Any, specs: Iterable[VariantSpec], ratios: Iterable[float]) -> list[Variant]:
    """One per method and ratio, with the settings that `apply_toma` uses for this model; one for shortcuts alone.

    Args:
        pipe_or_model: a model alone does not tell whether shortcuts that need a pipeline are possible.
    """
    ratios, model = list(ratios), find_denoiser(pipe_or_model)
    found: dict[Variant, None] = {}
    for spec in specs:
        for shortcut in spec.shortcuts:
            shortcut.check_on(pipe_or_model)
        if spec.merging is None:
            found[Variant(spec.shortcuts[0].name, shortcuts=spec.shortcuts)] = None
        else:
            for cell in cells_of(model, [spec.merging], ratios):
                found[Variant(cell.method, cell.config, cell.overrides, spec.shortcuts)] = None
    return list(found)


def count_blocks(model: Any) -> int:
    """Transformer blocks of a model."""
    family = find_family(model)
    return len(family.blocks(model)) if family else 0


def mixes_images(model: Any, variant: Variant) -> bool:
    """Whether an image would be another one in a batch of several, and not by rounding alone.

    So it is where all samples have one table of positions, as in Flux: they then share their destinations.
    """
    family = find_family(model)
    shares_positions = family is not None and family.is_joint(model)
    merges_jointly = variant.config is not None and variant.config.ratio > 0 and shares_positions
    return merges_jointly or any(shortcut.mixes_images for shortcut in variant.shortcuts)


def paper_variants(model: Any, table: str) -> tuple[list[Variant], list[str]]:
    """The rows of one of the paper's tables on this model, and a reason for each row that is not possible."""
    if table not in PAPER:
        raise UsageError(f"{table!r} is not a known table of the paper: use one of {', '.join(PAPER)}.")
    variants: list[Variant] = []
    left_out = []
    for methods, ratios in PAPER[table]:
        for text in methods:
            try:
                variants += variants_of(model, [VariantSpec.parse(text)], ratios)
            except UsageError as error:
                left_out.append(f"{text}: {error}")
    if not variants:
        raise UsageError(f"no row of {table} is possible on this model: {left_out[0]}")
    return variants, left_out
