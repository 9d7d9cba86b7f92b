"""What the commands that keep a run share: their options, and how they open a model and start a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toma_diffusion.errors import UsageError
from toma_lab.cli.options import find_device

if TYPE_CHECKING:
    import torch
    from accelerate import PartialState
    from rich.console import Console

    from toma_lab.pipelines.generation import ImageRequest
    from toma_lab.plan import Item

STEPS = 20
Model = Annotated[
    str,
    typer.Option(
        help="bundled, bundled-4step, bundled-flux, bundled-video (clips), a folder, a .safetensors file, a hub id."
    ),
]
Guidance = Annotated[
    float | None, typer.Option(help="Guidance scale. Default: that of the pipeline; of bundled-4step 1: none.")
]
Size = Annotated[str, typer.Option(help="In pixels: 1024 or 1024x768. Default: that of the pipeline.")]
Frames = Annotated[int | None, typer.Option(help="Of a clip. Default: those of the pipeline.")]
Fps = Annotated[float | None, typer.Option(help="Frames per second of a clip. Default: those of the model.")]
BeginsWith = Annotated[Path | None, typer.Option(help="What all clips of an image-to-video pipeline begin with.")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32. Default: the usual one of the model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU if there is one.")]
Commit = Annotated[str | None, typer.Option(help="Commit to record. Default: that of the checkout.")]
Prompts = Annotated[
    str, typer.Option(help="A text file, one prompt per line, or a CSV file with a column prompt. Default: ours.")
]


@dataclass(frozen=True)
class Opened:
    """A pipeline, and what it is asked for."""

    pipe: Any
    asked: dict[str, Any]
    """The fields of a plan that describe the model and its pictures."""
    image: Path | None

    @property
    def clips(self) -> bool:
        """Whether it makes clips."""
        return bool(self.asked["clips"])

    def request(self, item: Item) -> ImageRequest:
        """One picture."""
        from toma_lab.plan import Plan

        return Plan(prompts=(), **self.asked).request(item, self.asked["steps"], self.image)


@dataclass(frozen=True)
class Pictures:
    """What a user asks of the model. None, and an empty size: the default of the model."""

    steps: int | None
    guidance: float | None
    size: str = ""
    frames: int | None = None
    fps: float | None = None
    image: Path | None = None

    def __post_init__(self) -> None:
        if self.guidance is not None and not math.isfinite(self.guidance):
            raise UsageError(f"--guidance {self.guidance} is not allowed: it must be a number.")


def open_model(
    model: str,
    where: torch.device,
    dtype: str,
    pictures: Pictures,
    usual_steps: int = STEPS,
    steps_by_class: dict[str, int] | None = None,
) -> Opened:
    """Load a model, after everything that can be checked without it.

    Args:
        usual_steps: if neither the user nor the model says how many.
        steps_by_class: the same for denoisers whose class begins so.
    """
    from toma_diffusion.engine.install import find_denoisers
    from toma_lab.metrics.base import describe_file
    from toma_lab.parsing import Resolution
    from toma_lab.pipelines.checkpoints import fingerprint, load_pipeline, public_name, steps_and_guidance
    from toma_lab.pipelines.clips import ClipRequest, check_request
    from toma_lab.pipelines.generation import makes_clips

    frames, fps, image = pictures.frames, pictures.fps, pictures.image
    resolution = Resolution.parse(pictures.size, 8) if pictures.size else None
    pipe = load_pipeline(model, str(where), dtype or None)
    clips = makes_clips(pipe)
    if clips or (frames, fps, image) != (None, None, None):
        check_request(pipe, ClipRequest("", frames=frames, fps=fps, image=image))
    name = type(find_denoisers(pipe)[0]).__name__
    usual = next((count for start, count in (steps_by_class or {}).items() if name.startswith(start)), usual_steps)
    steps, guidance = steps_and_guidance(model, pictures.steps, pictures.guidance, usual)
    asked = {
        "model": public_name(model),
        "steps": steps,
        "guidance": guidance,
        "width": resolution.width if resolution else None,
        "height": resolution.height if resolution else None,
        "clips": clips,
        "frames": frames,
        "fps": fps,
        "image": "" if image is None else describe_file(image),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "weights": fingerprint(pipe),
    }
    return Opened(pipe, asked, image)


def open_state(device: str) -> tuple[torch.device, PartialState, Console]:
    """The device, the processes of an `accelerate launch`, and where the first of them prints."""
    from accelerate import PartialState
    from rich.console import Console

    where = find_device(device)
    # Processes wait for each other only between phases, which may be long.
    state = PartialState(cpu=where.type == "cpu", timeout=timedelta(days=1))
    where = state.device if state.num_processes > 1 else where
    return where, state, Console(markup=False, quiet=not state.is_main_process)


def print_lines(console: Console, lines: Iterable[str], beginning: str = "") -> None:
    """Plain lines, which are not wrapped."""
    for line in lines:
        console.print(f"{beginning}{line}", highlight=False, soft_wrap=True)
