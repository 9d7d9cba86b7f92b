"""`toma explain`: shows the method on an image, or inside a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors, versions

if TYPE_CHECKING:
    from rich.console import Console

    from toma_diffusion import Merge

PROMPT = "3d emoji of a red apple"
"""One that the demo model was trained on."""
STEPS = 50
"""As in the paper."""
ONLY_WITHOUT_MODEL, ONLY_WITH_MODEL = ("assign", "scale", "size"), ("prompt", "seed", "steps", "device")
"""Options that are refused in the other case."""


@report_user_errors
def explain(
    context: typer.Context,
    image: Annotated[Path | None, typer.Argument(help="An image file. Default: an image from this package.")] = None,
    output: Annotated[Path, typer.Option(help="The figure to write (PNG, PDF or SVG).")] = Path("toma-explain.png"),
    region: Annotated[str, typer.Option(help="tile, stripe or global.")] = "tile",
    num_regions: Annotated[int, typer.Option(help="Number of regions to ask for.")] = 64,
    assign: Annotated[str, typer.Option(help="local or global.")] = "local",
    scale: Annotated[float, typer.Option(help="Sharpness of the assignment. Lower blends more.")] = 1000.0,
    size: Annotated[int, typer.Option(help="Longest side of the image in pixels. Larger images are shrunk.")] = 512,
    model: Annotated[
        str,
        typer.Option(
            help="Inspect this model of images: bundled, bundled-4step, bundled-flux, a folder, a .safetensors file "
            "or a hub id."
        ),
    ] = "",
    prompt: Annotated[str, typer.Option(help="With --model: the prompt.")] = PROMPT,
    seed: Annotated[int, typer.Option(help="With --model: seed of the initial noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option(help=f"With --model: denoising steps. Default: {STEPS}; of bundled-4step 4.")
    ] = None,
    device: options.Device = "",
) -> None:
    """Show what merging keeps and loses of an image or, with --model, which tokens of a model are similar.

    With --model two figures are written, named after --output: which fraction of a block's destinations stays the same
    from step to step (the paper's Figure 4), and the tokens of every block in clusters (its Figures 3 and 9).
    """
    from rich.console import Console

    from toma_diffusion import Merge
    from toma_diffusion.files import check_writable

    console = Console(markup=False)
    count = None if region == "global" else num_regions
    config = Merge(region=region, num_regions=count, assign=assign, scale=scale, distance_weight=0.0)
    if output.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"output {str(output)!r} has no known format: end it in .png, .pdf or .svg.")
    if model and image is not None:
        raise UsageError(f"give an image, {str(image)!r}, or --model {model}, not both.")
    for name in ONLY_WITHOUT_MODEL if model else ONLY_WITH_MODEL:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise UsageError(f"--{name} can be used only {'without' if model else 'with'} --model: leave it out.")
    check_writable(output)
    if model:
        _explain_model(console, config, output, model, prompt, seed, steps, device)
    else:
        _explain_photograph(console, config, output, image, size)


def _explain_photograph(console: Console, config: Merge, output: Path, image: Path | None, size: int) -> None:
    from rich.progress import track
    from rich.table import Table

    from toma_diffusion.merge import Grid, Regions
    from toma_lab.inspection import photograph as method
    from toma_lab.inspection.figures import write_rows

    photograph = method.load_photograph(image, size)
    grid = Grid(photograph.shape[0] // method.PATCH, photograph.shape[1] // method.PATCH)
    regions = Regions.divide(grid, config.region, count=config.num_regions).describe()
    steps, total = method.reconstructions(photograph, config), len(method.SELECTIONS) * len(method.RATIOS)
    results = list(track(steps, description="merging", total=total, console=console, transient=True))

    table = Table(title=f"PSNR in dB, {grid.height}×{grid.width} tokens in {regions}")
    table.add_column("destinations chosen by")
    for ratio in method.RATIOS:
        table.add_column(f"ratio {ratio:g}", justify="right")
    for selection in method.SELECTIONS:
        table.add_row(selection, *(f"{result.psnr:.2f}" for result in results if result.selection == selection))
    console.print(table)

    method.plot_reconstructions(
        photograph, results, f"Token merging on an image: {regions}, {config.assign} assignment", output
    )
    facts = {"image": (image or method.SAMPLE).name, "grid": f"{grid.height}x{grid.width}", "regions": regions}
    facts |= {"assign": config.assign, "scale": f"{config.scale:g}"}
    rows = output.with_suffix(".csv")
    write_rows([each.row for each in results], facts | versions(), rows)
    console.print(f"Wrote {output} and {rows}", soft_wrap=True)


def _explain_model(
    console: Console,
    config: Merge,
    output: Path,
    model: str,
    prompt: str,
    seed: int,
    given_steps: int | None,
    device: str,
) -> None:
    from rich.progress import Progress

    from toma_lab.inspection.clusters import MOST_COLUMNS, MOST_ROWS, ClusterRecorder, plot_clusters
    from toma_lab.inspection.figures import choose_evenly, write_rows
    from toma_lab.inspection.overlap import OverlapRecorder, plot_overlap
    from toma_lab.inspection.watch import BlockInput, watch
    from toma_lab.pipelines.checkpoints import load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.generation import ImageRequest, generate_image

    steps, guidance = steps_and_guidance(model, given_steps, None, STEPS)
    request = ImageRequest(prompt, seed, steps, guidance)
    pipe = load_pipeline(model, str(find_device(device)))
    overlap = OverlapRecorder(config)
    clusters = ClusterRecorder(choose_evenly(range(steps), MOST_COLUMNS), [])

    def record(block_input: BlockInput) -> None:
        overlap(block_input)
        clusters(block_input)

    with Progress(console=console, transient=True) as progress, watch(pipe, record) as blocks:
        clusters.blocks = choose_evenly([block.name for block in blocks], MOST_ROWS)
        bar = progress.add_task("generating", total=steps)
        image = generate_image(pipe, request, lambda step: progress.advance(bar))

    written = [output.with_stem(f"{output.stem}-{name}") for name in ("destinations", "hidden-states")]
    written.append(written[0].with_suffix(".csv"))
    name = public_name(model)
    regions = "the whole grid" if config.region == "global" else f"{config.num_regions} {config.region}s asked for"
    title = f"{name}: destinations that stay the same, ratio {config.ratio:g}, {regions}"
    plot_overlap(overlap.shares, config, title, written[0])
    plot_clusters(image, clusters, f"{name}: clusters of the tokens that enter a block, {prompt!r}", written[1])
    facts = {"model": name, "prompt": prompt, "seed": seed, "steps": steps, "ratio": config.ratio}
    facts |= {"region": config.region, "num_regions": config.num_regions, **versions()}
    write_rows([each.row for each in overlap.shares], facts, written[2])
    console.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True, highlight=False)
