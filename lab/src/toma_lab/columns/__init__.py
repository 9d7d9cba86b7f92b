"""Columns: ways to make the same picture, to be compared with each other. One kind a file.

A column is the library with its settings (`ours.py`), one or more shortcuts (the other files), or both. It is written
as text, `fast`, `toma-stage:scale=inf`, `steps:14`, `toma-stage+steps:14`, and applied to a pipeline in a `with` block.
"""

from toma_lab.columns.base import Shortcut
from toma_lab.columns.column import BASELINE, NOISE_FLOOR, UNCHANGED, Column, ColumnSpec, columns_of
from toma_lab.columns.shortcuts import SHORTCUTS, parse_shortcut, shortcut_class, shortcut_from_dict

__all__ = [
    "BASELINE",
    "NOISE_FLOOR",
    "SHORTCUTS",
    "UNCHANGED",
    "Column",
    "ColumnSpec",
    "Shortcut",
    "columns_of",
    "parse_shortcut",
    "shortcut_class",
    "shortcut_from_dict",
]
