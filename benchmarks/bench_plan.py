"""What a merge plan costs in plain torch: selection, weights, merge, unmerge, one row each.

    python benchmarks/bench_plan.py --output plan.csv

On a GPU every operation is timed as CUDA-graph replay (the kernels alone) and eagerly (what an uncompiled model pays);
on a CPU only eagerly, on a smaller grid. Medians over many runs; the copy of the tokens is timed beside them, because
nothing that reads all tokens can be faster than half of it.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from toma_diffusion import Action, Grid, MergePlan, ToMAConfig, __version__

GPU_SHAPES = [(2, Grid(64, 64), 640), (2, Grid(32, 32), 1280), (1, Grid(64, 64), 3072)]  # SDXL's two levels, Flux
CPU_SHAPES = [(2, Grid(16, 16), 320)]
PRESETS = ("toma", "toma-stripe", "toma-tile", "toma-once")
RATIOS = (0.25, 0.5, 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--commit", default=head(), help="commit to note in the rows; that of this checkout if it is one"
    )
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if on_gpu else ("cpu", torch.float32)
    machine = machine_facts(arguments.commit)
    cells = [
        (shape, preset, ratio)
        for shape in (GPU_SHAPES if on_gpu else CPU_SHAPES)
        for preset in PRESETS
        for ratio in RATIOS
    ]
    rows: list[dict[str, object]] = []
    for (batch, grid, width), preset, ratio in track(cells, description="timing"):
        tokens = torch.randn(batch, grid.num_tokens, width, device=device, dtype=dtype)
        plan = MergePlan(
            grid, ToMAConfig.from_preset(preset, ratio=ratio), batch_size=batch, dtype=dtype, device=device
        )
        for op, call in operations(plan, tokens).items():
            rows.append(
                {
                    "op": op,
                    "preset": preset,
                    "ratio": ratio,
                    "regions": plan.regions.describe(),
                    "shape": f"{batch}x{grid.height}x{grid.width}x{width}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "eager_us": round(microseconds(call, arguments.repeats), 1),
                    "graph_us": round(microseconds(captured(call), arguments.repeats), 1) if on_gpu else "",
                    "plan_kib_per_sample": round(plan.num_bytes / batch / 1024),
                    "backend": "torch",
                    **machine,
                }
            )
    write(rows, arguments.output)


def operations(plan: MergePlan, tokens: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The plan's operations, and a copy of the tokens to measure them by."""
    plan.update(tokens, Action.SELECT)
    merged = plan.merge(tokens)
    target = torch.empty_like(tokens)
    return {
        "select+weights": lambda: plan.update(tokens, Action.SELECT),
        "weights": lambda: plan.update(tokens, Action.REWEIGH),
        "merge": lambda: plan.merge(tokens),
        "unmerge": lambda: plan.unmerge(merged),
        "copy": lambda: target.copy_(tokens),
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of one call, by CUDA events on a GPU."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    times: list[float] = [start_event.elapsed_time(end_event) for start_event, end_event in events]
    return statistics.median(times) * 1e3


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph: replaying it costs the kernels alone."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def machine_facts(commit: str) -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "toma_diffusion": __version__,
        "commit": commit,
    }


def head() -> str:
    described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"


def write(rows: list[dict[str, object]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = Table(title=f"µs, median; {rows[0]['gpu']}, torch {rows[0]['torch']}")
    columns = ("shape", "preset", "ratio", "op", "eager_us", "graph_us")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    console = Console()
    console.print(table)
    console.print(f"Wrote {path}")


if __name__ == "__main__":
    main()
