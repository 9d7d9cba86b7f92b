"""What the benchmarks of single operators share: shapes, timing, rows.

Kernels run as CUDA-graph replay (`triton.testing.do_bench_cudagraph`), many calls in one graph that take turns on
several sets of buffers, so that they read from memory and not from the cache; the copy they are compared with does the
same.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from toma_lab.facts import gather_facts
from torch import Tensor

from toma_diffusion import Merge
from toma_diffusion.merge import Action, Grid, MergePlan

MOST_SETS = 20
REPEATS = 20
CACHE = 128 * 2**20
"""More bytes than a GPU's cache holds."""


@dataclass(frozen=True)
class Shape:
    """A batch of token grids, cut into tiles."""

    side: int
    width: int
    tile: int
    batch: int = 2
    dtype: torch.dtype = torch.float16
    ratio: float = 0.5
    assign: str = "local"
    scale: float = 1000.0

    def __str__(self) -> str:
        hard = ", hard" if self.scale == float("inf") else ""
        where = "" if self.assign == "local" else ", global"
        return f"{self.batch}x{self.side}x{self.side}x{self.width}, tiles {self.tile}x{self.tile}{where}{hard}"

    def plan(self, backend: str) -> MergePlan:
        regions = (self.side // self.tile) ** 2
        config = Merge(ratio=self.ratio, num_regions=regions, assign=self.assign, scale=self.scale, backend=backend)
        return MergePlan(Grid(self.side, self.side), config, batch_size=self.batch, dtype=self.dtype, device=device())

    def tokens(self) -> list[Tensor]:
        """Several sets of tokens, together larger than the cache."""
        size = self.batch * self.side**2 * self.width * self.dtype.itemsize
        sets = min(MOST_SETS, 1 + CACHE // size) if torch.cuda.is_available() else 2
        generator = torch.Generator(device()).manual_seed(0)
        shape = (self.batch, self.side**2, self.width)
        return [torch.randn(shape, generator=generator, device=device()).to(self.dtype) for _ in range(sets)]


SHAPES = (
    [
        Shape(64, 640, 16),
        Shape(64, 640, 8),
        Shape(64, 640, 4),
        Shape(32, 1280, 16),
        Shape(32, 1280, 4),
        Shape(32, 1280, 2),
        Shape(64, 3072, 16, batch=1, dtype=torch.bfloat16),
        Shape(64, 3072, 8, batch=1, dtype=torch.bfloat16),
    ]
    if torch.cuda.is_available()
    else [Shape(16, 64, 8, dtype=torch.float32), Shape(16, 64, 4, dtype=torch.float32)]
)
"""The two levels of SDXL in tiles of 256 tokens, in 64 and in 256 tiles; Flux."""
GROWTH = [Shape(side, 640, 8, batch=1) for side in (64, 96, 128, 192, 256)] if torch.cuda.is_available() else []
"""The first level of SDXL from 1024² to 4096² pixels."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ready_plans(shape: Shape, tokens: Tensor) -> tuple[MergePlan, MergePlan]:
    """By kernels, where there are any, and in plain torch."""
    plans = shape.plan("auto"), shape.plan("torch")
    for plan in plans:
        plan.update(tokens, Action.SELECT)
    return plans


def microseconds(call: Callable[[int], object]) -> float:
    """Median time of one call. It gets its number, so that it can use its buffers in turn."""
    numbers = itertools.count()
    if not torch.cuda.is_available():
        return statistics.median(timeit.repeat(lambda: call(next(numbers)), number=1, repeat=REPEATS)) * 1e6
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(lambda: call(next(numbers)), return_mode="median")) * 1e3


def row(
    op: str, shape: Shape, us: float, reference_us: float, moved: int, tokens: Sequence[Tensor]
) -> dict[str, object]:
    """One result. `moved` is the fewest bytes that the operator must read and write."""
    target = torch.empty_like(tokens[0])
    copy_us = microseconds(lambda index: target.copy_(tokens[index % len(tokens)]))
    return {
        "op": op,
        "shape": str(shape),
        "tokens": shape.batch * shape.side**2,
        "ratio": shape.ratio,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "us": round(us, 2),
        "reference_us": round(reference_us, 2),
        "speedup": round(reference_us / us, 2),
        "gb_per_s": round(moved / us / 1e3, 1),
        "copy_gb_per_s": round(2 * target.nbytes / copy_us / 1e3, 1),
        "copy_us": round(copy_us, 2),
    }


def main(measure: Callable[[Shape], list[dict[str, object]]], title: str, shapes: Sequence[Shape] = ()) -> None:
    """Measure all shapes, print a table, and put the rows into a file in place of older ones of the same operators."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/local/ops.csv"))
    parser.add_argument("--commit", help="if not that of the checkout")
    arguments = parser.parse_args()
    facts = vars(gather_facts(device(), arguments.commit))
    rows = [found | facts for shape in [*SHAPES, *shapes, *GROWTH] for found in measure(shape)]
    table = Table(title=f"{title}: µs, {facts['gpu']}, torch {facts['torch']}")
    columns = ("op", "shape", "dtype", "us", "reference_us", "speedup", "gb_per_s", "copy_gb_per_s")
    for column in columns:
        table.add_column(column)
    for found in rows:
        table.add_row(*(str(found[column]) for column in columns))
    Console().print(table)
    _write(rows, arguments.output)


def _write(rows: list[dict[str, object]], path: Path) -> None:
    measured = {found["op"] for found in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [dict(old) for old in csv.DictReader(file) if old["op"] not in measured]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(kept + rows)
    Console().print(f"Wrote {path}")
