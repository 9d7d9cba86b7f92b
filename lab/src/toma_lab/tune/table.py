"""The table of a search: one row a candidate, with every setting, the machine and the versions."""

from __future__ import annotations

from toma_lab.rows import Row
from toma_lab.tune.folder import TuneFolder
from toma_lab.tune.outcome import Outcome, Result


def state_of(result: Result, outcome: Outcome) -> str:
    """What became of a candidate."""
    if result.failure:
        return f"failed: {result.failure}"
    if result == outcome.chosen:
        return "chosen"
    return "finalist" if result.is_finalist else "dropped in the search"


def write_table(folder: TuneFolder, outcome: Outcome) -> None:
    """Replace table.csv."""
    clip = folder.clip_size()
    common = folder.common_cells() | {"goal": str(outcome.goal)}
    common |= {"frames": clip.frames, "resolution": f"{clip.width}x{clip.height}"} if clip else {}
    folder.write_table(
        common | result.column.cells | {"state": state_of(result, outcome)} | _figures(result)
        for result in outcome.results
    )


def _figures(result: Result) -> Row:
    figures = result.figures
    if figures is None:
        return {}
    distances = {"lpips": figures.lpips, "psnr": figures.psnr, "flicker": figures.flicker}
    cells = {name: f"{value:.6g}" for name, value in distances.items() if value is not None}
    return {"images": figures.images, "speedup": f"{figures.speed_up:.4f}"} | cells
