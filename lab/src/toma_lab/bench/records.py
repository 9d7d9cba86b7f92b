"""The rows of measurements, in a file that is valid CSV at every moment."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toma_diffusion.errors import UsageError
from toma_diffusion.files import replacing


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement with everything that it depends on. Times are medians; None is an empty cell."""

    model: str
    method: str
    settings: str
    """What the user set and what differs from the defaults, as compact JSON."""
    scope: str
    assign: str
    ratio: str
    resolution: str
    """Width x height."""
    batch: str
    """Of one call of the denoiser, both halves of classifier-free guidance included."""
    mode: str
    compile: str
    steps: str
    step_ms: float
    """Time of a run of that many steps, divided by their number."""
    step_ms_p20: float
    step_ms_p80: float
    baseline_ms: float
    """Without merging, in the same group and the same run of the benchmark."""
    speedup: float
    lower_bound_ms: float | None = None
    over_lower_bound: float | None = None
    """step_ms / lower_bound_ms − 1: what choosing and weighing cost."""
    floor_ms: float | None = None
    over_floor: float | None = None
    """step_ms / floor_ms − 1: what merging costs altogether."""
    peak_mib: float | None = None
    baseline_peak_mib: float | None = None
    pipeline_s: float | None = None
    """Text encoders, all steps and the decoder."""
    baseline_pipeline_s: float | None = None
    cache: str = ""
    """Threshold of the first-block cache, if it is on."""
    cache_hits: float | None = None
    """Fraction of the steps in which the cache skipped blocks."""
    backend: str = ""
    """Which operators merged."""
    attention: str = ""
    dtype: str = ""
    gpu: str = ""
    torch: str = ""
    diffusers: str = ""
    triton: str = ""
    toma_diffusion: str = ""
    commit: str = ""
    date: str = ""
    baseline_drift: float | None = None
    """Relative change of the baseline's time from the beginning of the group to its end. If it is far from 0, something
    else was using the machine, and the speed-up means nothing. Empty until the group is finished."""
    frames: str = ""
    """Of a clip. Empty for images."""


COLUMNS = tuple(field.name for field in fields(Row))
NEW_COLUMNS: Mapping[str, str] = {"frames": ""}
"""Columns that older files do not have, with what they then mean."""


class Records:
    """A CSV file of rows. Every new row replaces the file as a whole, so that it is never seen half written."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.exists() and not fresh:
            self.rows = read(path)
        else:
            self._write()

    def append(self, row: Row) -> None:
        """Add a row; when this returns, it is on the disk."""
        self.rows.append({name: "" if value is None else str(value) for name, value in asdict(row).items()})
        self._write()

    def note_drift(self, first: int, drift: float) -> None:
        """Write the drift of the baseline into all rows from number `first` on."""
        for row in self.rows[first:]:
            row["baseline_drift"] = str(drift)
        self._write()

    def matching(self, wanted: Mapping[str, str]) -> list[dict[str, str]]:
        """The rows that have these values."""
        return [row for row in self.rows if wanted.items() <= row.items()]

    def _write(self) -> None:
        with replacing(self.path) as file:
            writer = csv.DictWriter(file, fieldnames=COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Lock a file of rows. Two benchmarks that write the same file would lose each other's rows.

    If a process dies, its lock is released.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError(f"another benchmark is writing {str(path)!r}: give each an --output of its own.") from None
    try:
        yield
    finally:
        lock.release()


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file. One that holds anything else is refused, not overwritten."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            found = tuple(reader.fieldnames or ())
            if found in (COLUMNS, tuple(name for name in COLUMNS if name not in NEW_COLUMNS)):
                return [{**NEW_COLUMNS, **row} for row in reader]
    except (UnicodeDecodeError, csv.Error):
        pass  # not even a CSV file
    raise UsageError(
        f"{str(path)!r} has other columns than these rows: give another --output, or --fresh to overwrite it."
    )
