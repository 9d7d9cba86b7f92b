"""The rows of the paper's tables, as columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.errors import UsageError
from toma_lab.columns.column import Column, ColumnSpec, columns_of

RATIOS = (0.25, 0.5, 0.75)
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


def paper_columns(model: Any, table: str) -> tuple[list[Column], list[str]]:
    """The rows of one of the paper's tables on this model, and a reason for each row that is not possible."""
    if table not in PAPER:
        raise UsageError(f"{table!r} is not a known table of the paper: use one of {', '.join(PAPER)}.")
    columns: list[Column] = []
    left_out = []
    for methods, ratios in PAPER[table]:
        for text in methods:
            try:
                columns += columns_of(model, [ColumnSpec.parse(text)], ratios)
            except UsageError as error:
                left_out.append(f"{text}: {error}")
    if not columns:
        raise UsageError(f"no row of {table} is possible on this model: {left_out[0]}")
    return columns, left_out
