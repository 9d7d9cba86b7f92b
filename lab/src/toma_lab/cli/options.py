"""What several commands do in the same way: report the user's mistakes, find the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from toma_diffusion.errors import UsageError

if TYPE_CHECKING:
    import torch

Command = TypeVar("Command", bound=Callable[..., Any])
EXTRAS = {
    "gradio": "playground",
    "imageio": "video",
    "imageio_ffmpeg": "video",
    "DeepCache": "compare",
    "cache_dit": "compare",
    "toma_diffusion_demo": "demo",
}
"""Modules that come with an extra of the laboratory."""


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (UsageError, ModuleNotFoundError) as error:
        message = str(error)
        if isinstance(error, ModuleNotFoundError):
            module = (error.name or "").partition(".")[0]
            if module not in EXTRAS:
                raise
            message = f"{module} is not installed. Install it: pip install 'toma-diffusion-lab[{EXTRAS[module]}]'."
        typer.echo(f"Error: {message}", err=True)
        raise typer.Exit(2) from error


def report_user_errors(command: Command) -> Command:
    """A command that prints a user's mistake in one line, and ends with exit code 2.

    All other errors, a ValueError or OSError too, are bugs or accidents, and keep their traceback.
    """
    return _reported()(command)


def versions() -> dict[str, str]:
    """What files note about the packages that made them."""
    from importlib import metadata

    return {name: metadata.version(name.replace("_", "-")) for name in ("toma_diffusion", "torch", "diffusers")}


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
