"""What several commands read from their options in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    import torch

Number = TypeVar("Number", int, float)


@contextmanager
def mistakes_told(extras: str) -> Iterator[None]:
    """Around a command: what its user can mend is told in a sentence, without a traceback.

    Args:
        extras: those of the package that have all that the command may need.
    """
    try:
        yield
    except ImportError as error:
        raise typer.BadParameter(
            f"{error}. Install what is missing: pip install 'toma-diffusion[{extras}]'."
        ) from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """A list of numbers separated by commas; `name` is what an error calls one of them."""
    from toma_diffusion.bench.scenario import split_list

    found = []
    for item in split_list(text):
        try:
            found.append(kind(item))
        except ValueError as error:
            raise ValueError(f"{name} {item!r} is not a number.") from error
    return found


def find_device(name: str) -> torch.device:
    """The device of that name; without a name a GPU if there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not known: use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device {name!r} is not available here: use cpu, or cuda where there is a GPU.")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # events, streams and graphs are made on the current device
    return device
