"""What several commands do in the same way: report the user's mistakes, find the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

from toma_diffusion.errors import UsageError

if TYPE_CHECKING:
    import torch

OPTIONAL_MODULES = (
    *("accelerate", "numpy", "PIL", "safetensors", "torchmetrics", "transformers"),  # the extra `metrics`
    *("jinja2", "matplotlib"),  # with numpy and PIL the extra `report`
    "gradio",  # the extra `playground`
)
"""Modules that come with one of the extras."""


@contextmanager
def report_user_errors(extras: str) -> Iterator[None]:
    """Print a user's mistake in one line, and end with exit code 2. Use it as a decorator of a command.

    All other errors, a ValueError or OSError too, are bugs or accidents, and keep their traceback.

    Args:
        extras: those of this package that contain everything the command may need.
    """
    try:
        yield
    except UsageError as error:
        _fail(str(error), error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL_MODULES:
            raise
        _fail(f"{error.name} is not installed. Install it: pip install 'toma-diffusion[{extras}]'.", error)


def _fail(message: str, error: Exception) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2) from error


def find_device(name: str) -> torch.device:
    """The device of that name. If the name is empty, a GPU if there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known: use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device {name!r} is not available here: use cpu, or cuda where there is a GPU.")
    if device.index is not None and device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise UsageError(f"device {name!r} is not available here: there are {torch.cuda.device_count()} GPUs.")
        torch.cuda.set_device(device)  # events, streams and graphs are made on the current device
    return device
