"""`toma report`: a run of `toma eval` as one page."""

from pathlib import Path
from typing import Annotated

import typer

from toma_diffusion.cli.options import mistakes_told


@mistakes_told("metrics,report")
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `toma eval` or `toma demo` wrote.")],
    output: Annotated[Path | None, typer.Option(help="The page; if not given, report.html in that folder.")] = None,
) -> None:
    """Make one self-contained HTML page of a run: table, plots, images to compare, every setting."""
    from rich.console import Console

    from toma_diffusion.evaluation import RunFolder
    from toma_diffusion.report.page import write_report

    path = write_report(RunFolder(folder), output)
    size = path.stat().st_size / 2**20
    Console(markup=False).print(f"Wrote {path} ({size:.1f} MiB)", soft_wrap=True, highlight=False)
