"""The variants of ToMA by name: the paper's, and ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.checks import hint, listed
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.config import Merge

_PAPER: Mapping[str, Any] = MappingProxyType(
    {"distance_weight": 0.0, "share_plan": True, "select_every": 10, "reweigh_every": 5}
)
"""The paper does not look at distances, has one plan for all blocks of a kind, and selects every tenth step."""

LATE = Merge(scope="block", window=(0.5, 1.0), min_tokens=512)
"""Merges in the second half of the steps only, and not on small grids: of what merges alone closest to the original."""

VARIANTS: Mapping[str, Merge] = MappingProxyType(
    {
        "toma": Merge(num_regions=64, assign="global", scale=math.inf, scope="module", **_PAPER),
        "toma-stripe": Merge(region="stripe", num_regions=64, scope="module", **_PAPER),
        "toma-tile": Merge(num_regions=256, scope="module", **_PAPER),
        "toma-once": Merge(num_regions=64, scope="block", **_PAPER),
        "toma-stage": Merge(),
        "toma-late": LATE,
    }
)
"""`toma-stage` merges around stages: of what merges alone it is the fastest. It chooses in every step and for
every stage, in regions of 256 tokens, with a mild preference for near tokens. `toma-late` does so in the second
half of the steps only, block by block. All figures are in docs/quality.md.

The others are the paper's. `toma` uses a hard assignment, the limit of the paper's sharp softmax. It loses less of an
image (40.9 instead of 37.2 dB at ratio 0.25, benchmarks/results/assignment.csv), and an index is faster than a matrix
over all tokens. The paper's own setting is `scale=1000`."""


def variant(name: str, ratio: float | None = None, *, selects_every_step: bool = False) -> Merge:
    """A variant by its name, perhaps with another ratio.

    `selects_every_step` says whether the paper selects in every step in this model family: it does in transformers.
    """
    if name not in VARIANTS:
        raise UsageError(f"variant={name!r} is not known: {listed(VARIANTS)}.{hint(name, VARIANTS)}")
    changes: dict[str, Any] = {} if ratio is None else {"ratio": ratio}
    if selects_every_step:
        changes |= {"select_every": 1, "reweigh_every": None}
    return VARIANTS[name].changed(changes)
