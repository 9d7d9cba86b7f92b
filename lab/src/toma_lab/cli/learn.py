"""`toma learn`: learn on a model which steps to compute and how to predict the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli import run_options as options
from toma_lab.cli.options import find_device, report_user_errors

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from toma_diffusion.skip.learned import Learned
    from toma_diffusion.skip.learning import Distance

FIRST_SEED = 1000
"""Other commands begin with 0: what is learned from is not what is looked at later."""


@report_user_errors
def learn_command(
    model: options.Model = "bundled",
    steps: Annotated[
        int | None, typer.Option(help=f"Denoising steps of a generation. Default: {options.STEPS}; of bundled-4step 4.")
    ] = None,
    guidance: options.Guidance = None,
    computed: Annotated[
        str, typer.Option(help="How many steps are computed: 12,8,6. Default: as many as the presets compute.")
    ] = "",
    images: Annotated[
        int,
        typer.Option(help="Generations to learn from. One of four is not learned from, but checks what was learned."),
    ] = 6,
    minutes: Annotated[
        float,
        typer.Option(help="How long to go on afterwards: other steps and weights are tried on whole generations."),
    ] = 0.0,
    prompts: options.Prompts = "",
    size: options.Size = "",
    frames: options.Frames = None,
    image: options.BeginsWith = None,
    lpips_weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file. Without it, the difference of pixels is used.")
    ] = None,
    dtype: options.Dtype = "",
    device: options.Device = "",
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("learned.json"),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, although a command that was ended could be resumed.")
    ] = False,
) -> None:
    """Learn on a model which steps to compute and how to predict the others. Writes learned.json.

    Takes about the time of nine generations, and the --minutes that you give it. Ended, the same command goes on.
    """
    import warnings
    from functools import partial

    from rich.console import Console

    from toma_diffusion import speed_up
    from toma_diffusion.files import check_writable
    from toma_diffusion.presets import PRESETS
    from toma_diffusion.skip.learning import FEWEST
    from toma_diffusion.skip.store import FolderStore
    from toma_lab.pipelines.clips import generate
    from toma_lab.plan import Item
    from toma_lab.prompts import built_in_prompts, load_prompts

    if images < FEWEST:
        raise UsageError(f"--images {images} are too few to learn from: give {FEWEST} or more.")
    if not 0 <= minutes < float("inf"):  # handle.learn says the same, but only when a model is loaded
        raise UsageError(f"--minutes {minutes} is not allowed: give 0 or more.")
    counts = _counts(computed)
    where = find_device(device)
    chosen = load_prompts(prompts) if prompts else ()
    opened = options.open_model(
        model,
        where,
        dtype,
        options.Pictures(steps, guidance, size, frames, image=image),
    )
    opened.pipe.set_progress_bar_config(disable=True)
    chosen = chosen or built_in_prompts(model, clips=opened.clips)
    items = [Item(index, chosen[index % len(chosen)], FIRST_SEED + index) for index in range(images)]
    requests = [opened.request(item) for item in items]
    settings = {name: opened.asked[name] for name in ("model", "weights", "dtype")}
    settings |= {"device": where.type, "requests": [str(each) for each in requests]}
    settings |= {"computed": computed, "lpips": lpips_weights is not None}
    check_writable(output)
    folder = output.with_name(f".{output.name}.learning")
    if fresh and folder.exists():
        FolderStore.clear(folder)
    store = FolderStore(folder, settings)
    console = Console(markup=False)
    handle = speed_up(opened.pipe, "fast")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        learned = handle.learn(
            [partial(generate, opened.pipe, [each]) for each in requests],
            computed=counts,
            minutes=minutes,
            distance=None if lpips_weights is None else _lpips(lpips_weights, where),
            folder=store,
        )
    for warning in caught:
        if "left as it was" in str(warning.message):  # what was refused
            console.print(f"Note: {warning.message}", highlight=False, soft_wrap=True)
    handle.save(output)
    store.delete()
    console.print(_table(learned, "LPIPS" if lpips_weights else "difference of pixels"))
    skips = {name: preset(learned.num_steps).skip for name, preset in PRESETS.items()}
    by_preset = {name: skip.count(learned.num_steps) for name, skip in skips.items() if skip is not None}
    named = next((f'"{name}"' for name, count in by_preset.items() if count in learned.counts), None)
    setting = named or f"skip=Skip(computed={learned.counts[0]})"
    console.print(f"Wrote {output}. Use it: speed_up(pipe, {setting}, learned={str(output)!r})", highlight=False)


def _counts(text: str) -> list[int] | None:
    if not text:
        return None
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--computed {text!r} is not a list of numbers: write 12,8,6.") from error
    if min(counts) < 1:
        raise UsageError(f"--computed {text!r} has a number below 1: at least one step is computed.")
    return counts


def _lpips(path: Path, device: Any) -> Distance:
    """LPIPS of pictures, or the mean over the frames of a clip."""
    import torch

    from toma_lab.metrics.lpips import Lpips

    metric = Lpips(path, device)

    def pixels(pictures: Sequence[Tensor]) -> Tensor:
        return torch.stack([each.permute(2, 0, 1).float() / 255 for each in pictures]).to(device)

    @torch.no_grad()
    def distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        return float(metric.distances(pixels(ones), pixels(others)).mean())

    return distance


def _table(learned: Learned, what: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=f"Learned for {learned.num_steps} steps", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("computed", "steps", f"{what} ↓", "with nothing learned"):
        table.add_column(heading, overflow="fold")
    for each in learned.steps:
        numbers = (f"{each.distance:.4f}", f"{each.distance_before:.4f}")
        table.add_row(str(each.count), ", ".join(map(str, each.computed)), *numbers)
    return table
