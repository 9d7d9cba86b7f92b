"""Count the multiplications of a step that reuses, as a share of a computed one: results/reuse_multiplications.csv.

    python benchmarks/reuse_multiplications.py

Of models of real size without weights, so that it runs anywhere. It is a bound, not a time: what is neither a matrix
product nor a convolution is not counted.
"""

import csv
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from toma_diffusion import Grid, Reuse, ToMAConfig, apply_toma
from toma_diffusion.adapters.flux import FluxAdapter
from toma_diffusion.adapters.ids import IdReader
from toma_diffusion.bench.models import build
from toma_diffusion.files import replacing

FILE = Path(__file__).with_name("results") / "reuse_multiplications.csv"
COLUMNS = ("model", "part", "resolution", "batch", "computed", "reused", "share")
MODELS = ("sdxl", "sd15", "flux", "sd35")
META = torch.device("meta")


class SquareGrids(IdReader):
    """Reads the grid from the number of tokens: position ids have no values here."""

    def grid(
        self, ids: torch.Tensor, num_tokens: int, text_tokens: int = 0, made_from: torch.Tensor | None = None
    ) -> Grid:
        side = round(num_tokens**0.5)
        return Grid(side, side)


class SquareFlux(FluxAdapter):
    """Flux on square images."""

    def __init__(self) -> None:
        self._ids = SquareGrids()


def on_meta(value: Any) -> Any:
    """Without values."""
    if isinstance(value, dict):
        return {name: on_meta(each) for name, each in value.items()}
    return value.to(META) if isinstance(value, torch.Tensor) else value


def count(name: str, part: str) -> dict[str, Any]:
    """Of one model and one part."""
    denoiser = build(name, small=False, device=META, dtype=torch.float16)
    side, batch = denoiser.default_resolution, denoiser.default_batch
    values = build(name, small=False, device=torch.device("cpu"), dtype=torch.float16).inputs(batch, side, side)
    torch.nn.Module.to(denoiser.model, META, torch.float16)
    handle = apply_toma(denoiser.model, ToMAConfig(ratio=0, reuse=Reuse(start=0.0, part=part)))
    handle.begin(2)
    totals = []
    for step in range(2):
        handle.step(step)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            denoiser.model(**on_meta(values), return_dict=False)
        totals.append(counter.get_total_flops() // 2)
    share = round(totals[1] / totals[0], 4)
    return dict(zip(COLUMNS, (name, part, side, batch, *totals, share), strict=True))


def main() -> None:
    from toma_diffusion.adapters import register_adapter

    register_adapter(SquareFlux)
    rows = [count(name, part) for name in MODELS for part in ("blocks", "deep")]
    with replacing(FILE) as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(f"{row['model']}, {row['part']}: {row['share']:.2%}")


if __name__ == "__main__":
    main()
