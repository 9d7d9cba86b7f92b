"""What several commands read from their options in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


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
