"""`toma report`: one HTML page for a run of `toma eval`."""

from pathlib import Path
from typing import Annotated

import typer

from toma_lab.cli.options import report_user_errors


@report_user_errors
def report(
    folder: Annotated[Path, typer.Argument(help="A folder written by `toma eval` or `toma demo`.")],
    output: Annotated[Path | None, typer.Option(help="The page to write. Default: report.html in that folder.")] = None,
) -> None:
    """Write a run as one self-contained HTML page: table, plots, images to compare, all settings."""
    from rich.console import Console

    from toma_lab.evaluate import EvalFolder
    from toma_lab.report.page import write_report

    path = write_report(EvalFolder(folder), output)
    size = path.stat().st_size / 2**20
    Console(markup=False).print(f"Wrote {path} ({size:.1f} MiB)", soft_wrap=True, highlight=False)
