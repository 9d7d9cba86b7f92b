"""`toma explain`: the quickest way to understand the method."""

from pathlib import Path
from typing import Annotated

import typer


def explain(
    image: Annotated[Path | None, typer.Argument(help="A photograph; without one, a bundled portrait.")] = None,
    output: Annotated[Path, typer.Option(help="The picture to write (PNG, PDF or SVG).")] = Path("toma-explain.png"),
    region: Annotated[str, typer.Option(help="tile, stripe or global.")] = "tile",
    num_regions: Annotated[int, typer.Option(help="How many regions to ask for.")] = 64,
    assign: Annotated[str, typer.Option(help="local or global.")] = "local",
    scale: Annotated[float, typer.Option(help="Sharpness of the assignment; lower blends more.")] = 1000.0,
    size: Annotated[int, typer.Option(help="Longest side to shrink the photograph to, in pixels.")] = 512,
) -> None:
    """Merge the patches of a photograph and spread them back, and draw what is kept and what is lost."""
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from toma_diffusion import __version__
    from toma_diffusion import explain as method
    from toma_diffusion.config import ToMAConfig
    from toma_diffusion.core import Grid, Regions

    console = Console()
    try:
        config = ToMAConfig(region=region, num_regions=num_regions, assign=assign, scale=scale)
        if output.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"output {str(output)!r} has no known format: end it in .png, .pdf or .svg.")
        photograph = method.load_photograph(image, size)
        output.parent.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise typer.BadParameter(f"{error}. Install what is missing: pip install 'toma-diffusion[report]'.") from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    total = len(method.SELECTIONS) * len(method.RATIOS)
    steps = method.reconstructions(photograph, config)
    results = list(track(steps, description="merging", total=total, console=console, transient=True))

    height, width, _ = photograph.shape
    grid = Grid(height // method.PATCH, width // method.PATCH)
    regions = Regions.divide(grid, region, num_regions).describe()
    table = Table(title=f"PSNR in dB, {grid.height}×{grid.width} tokens in {regions}")
    table.add_column("destinations chosen by")
    for ratio in method.RATIOS:
        table.add_column(f"ratio {ratio:g}", justify="right")
    for selection in method.SELECTIONS:
        table.add_row(selection, *(f"{result.psnr:.2f}" for result in results if result.selection == selection))
    console.print(table)

    title = f"Token merging on a photograph: {regions}, {assign} assignment"
    method.draw(photograph, results, title, output)
    rows = output.with_suffix(".csv")
    facts = {
        "image": image.name if image else "astronaut (scikit-image)",
        "grid": f"{grid.height}x{grid.width}",
        "regions": regions,
        "assign": assign,
        "scale": scale,
        "toma_diffusion": __version__,
        "torch": torch.__version__,
    }
    method.write_rows(results, facts, rows)
    console.print(f"Wrote {output} and {rows}", soft_wrap=True)
