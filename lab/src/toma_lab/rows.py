"""The row: one result of any command, with everything that it depends on.

A row says what was run, of which model and how, on which machine and code, what it cost, and how near the picture
stayed. A cell that was not measured, or says nothing about this result, is empty or absent.

    rows = Rows(path, key=("title", "prompt", "seed"))     # .jsonl: lines are appended; .csv: replaced as a whole
    rows.add({"title": "fast", "prompt": "a cat", "seed": 0, "seconds": 1.2})
    rows.get(title="fast", prompt="a cat", seed=0)         # None if there is none
    rows.matching({"model": "sdxl"} | asdict(facts))

A process that is killed leaves a valid file: a line that was cut off is left out by whoever reads it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from toma_diffusion.errors import UsageError
from toma_diffusion.files import append_line, replacing

Row = dict[str, Any]
WHAT = (
    *("run", "model", "title", "method", "settings", "scope", "assign", "ratio", "changed", "shortcuts"),
    *("column", "column_id", "prompt", "seed", "item"),
)
"""`run`: the command, or the part of a benchmark. `settings`: JSON, what differs from the defaults. `column`: JSON, the
whole way in which the picture was made; `column_id`: its name in paths, as `item` is that of the prompt and seed."""
CONDITIONS = (
    *("resolution", "frames", "images", "batch", "mode", "compile", "cache", "steps", "guidance", "dtype", "weights"),
    *("blocks", "lpips_weights", "sources", "goal", "budget", "state", "failure"),
)
"""`failure`: why there is no result; the same command tries it again."""
COST = (
    *(
        "seconds",
        "baseline_seconds",
        "speedup",
        "calls",
        "computed",
        "computed_steps",
        "skipped",
        "gain",
        "gain_source",
    ),
    *("step_ms", "step_ms_p20", "step_ms_p80", "baseline_ms", "lower_bound_ms", "over_lower_bound"),
    *("floor_ms", "over_floor", "peak_mib", "baseline_peak_mib", "pipeline_s", "baseline_pipeline_s", "cache_hits"),
    *("backend", "attention", "baseline_drift"),
)
"""`seconds`: of one picture. `calls`: for which a denoiser ran. `computed`: the steps that were computed;
`computed_steps`: which they are. `skipped`: the share of the steps in which a cache skipped blocks. `gain`: how many
times fewer steps, or less time on a large model."""
QUALITY = ("mse", "psnr", "ssim", "lpips", "lpips_converged", "dino", "clip_t", "flicker", "fid", "kid")
"""Distances to the picture of the model as it is."""
FACTS = ("gpu", "torch", "diffusers", "triton", "toma_diffusion", "commit", "date")
COLUMNS = (*WHAT, *CONDITIONS, *COST, *QUALITY, *FACTS)
ESSENTIAL = ("model", "method")
"""A CSV file without these columns is not one of rows."""


class Rows:
    """The rows of a file, in the order in which they were first added.

    Args:
        path: a `.jsonl` file, to which every row is appended as a line, or a `.csv` file, which is replaced as a whole
            and has the columns that any of its rows needs. Several processes may write the same file.
        key: the columns that identify a result: a second row of the same key changes the cells that it has. Without a
            key every row is another result.
        fresh: begin anew, whatever the file holds.
    """

    def __init__(self, path: Path, key: tuple[str, ...] = (), *, fresh: bool = False) -> None:
        self.path, self.key = path, key
        self._is_log = path.suffix == ".jsonl"
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._read_until = 0
        if fresh:
            path.unlink(missing_ok=True)
        self.refresh()
        if self._is_log:  # what failed before is tried again
            self._rows = {name: row for name, row in self._rows.items() if not row.get("failure")}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, **wanted: Any) -> Row | None:
        """The row of a key, or else the last one that has these values."""
        if self.key and wanted.keys() == set(self.key):
            return self._rows.get(tuple(wanted[name] for name in self.key))
        return next(reversed(self.matching(wanted)), None)

    def matching(self, wanted: Mapping[str, Any]) -> list[Row]:
        """The rows that have these values. A column that a file does not have is empty."""
        return [row for row in self if all(row.get(name, "") == value for name, value in wanted.items())]

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Add or change rows; when this returns, they are on the disk."""
        for row in rows:
            unknown = [name for name in row if name not in COLUMNS and not any(name in each for each in self)]
            if unknown:
                raise KeyError(f"{unknown[0]!r} is no column of a row.")
        if self._is_log:
            for row in rows:
                append_line(self.path, json.dumps({name: _plain(value) for name, value in row.items()}))
            self.refresh()
            return
        with FileLock(self.path.with_name(f".{self.path.name}.write.lock")):
            if self.key:
                self.refresh()
            for row in rows:  # measured again, a row is replaced: its cells belong together
                cells = {name: "" if value is None else str(value) for name, value in row.items()}
                self._rows.get(self._key_of(cells), {}).clear()  # in its place
                self._put(cells)
            write_csv(self.path, self)

    def write(self) -> None:
        """Write a CSV file anew, after cells of its rows were changed in place."""
        write_csv(self.path, self)

    def refresh(self) -> None:
        """Read what other processes have added."""
        if self._is_log:
            self._read_lines()
        elif self.path.exists():
            self._rows = {}
            for row in read_csv(self.path):
                self._put(row)

    def _read_lines(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_until)
            for line in file:
                if not line.endswith(b"\n"):  # being written, or cut off
                    break
                self._read_until += len(line)
                try:
                    self._put(json.loads(line))
                except ValueError:  # cut off in an earlier run, and ended by the next one
                    continue

    def _key_of(self, row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name, "") for name in self.key) if self.key else (len(self._rows),)

    def _put(self, row: Row) -> None:
        held = self._rows.setdefault(self._key_of(row), {})
        if "failure" in held and "failure" not in row:
            del held["failure"]
        held |= row


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A cell as a number; None if it is empty."""
    value = row.get(name)
    return None if value in (None, "") else float(value)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file, with all columns that it has. One that holds anything else is refused."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not set(reader.fieldnames or ESSENTIAL).issuperset(ESSENTIAL):
                raise csv.Error(f"no column {' or '.join(ESSENTIAL)}")
            return list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{str(path)!r} holds no rows of ours ({error}): give another file, or delete it.") from error


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str] = ()) -> None:
    """Replace a CSV file. It has these columns, those that any row needs, and those of older rows."""
    held = list(rows)
    older = dict.fromkeys(name for row in held for name in row if name not in COLUMNS)
    needed = [name for name in COLUMNS if name in (*ESSENTIAL, *columns) or any(_text(row, name) for row in held)]
    with replacing(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*needed, *older])
        writer.writerows([_text(row, name) for name in (*needed, *older)] for row in held)


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    """JSON has no infinity, which is the PSNR of equal images."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
