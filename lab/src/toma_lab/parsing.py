"""Reading lists, values and sizes that a user wrote on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from toma_diffusion.errors import UsageError

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Resolution:
    """Size of the image in pixels."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str, multiple: int) -> Resolution:
        """`1024`, or `1024x768` for width × height."""
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
        sides = [int(side) for side in match.groups() if side] if match else []
        if not sides or any(side == 0 or side % multiple for side in sides):
            raise UsageError(
                f"resolution {text!r} is not allowed: give 1024 or, width × height, 1024x768, "
                f"in multiples of {multiple} for this model."
            )
        return cls(sides[0], sides[-1])

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def split_list(text: str) -> list[str]:
    """The items of a list separated by commas; commas in parentheses belong to their item."""
    return [item.strip() for item in re.split(r",(?![^(]*\))", text) if item.strip()]


def parse_value(text: str) -> Any:
    """A number, a tuple in parentheses, or else the text itself."""
    if text.startswith("(") and text.endswith(")"):
        return tuple(parse_value(item) for item in split_list(text[1:-1]))
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_settings(text: str, changes: str) -> dict[str, Any]:
    """`num_regions=256;scope=block` as values by name; `text` is the whole method, for errors."""
    found = {}
    for change in filter(None, (part.strip() for part in changes.split(";"))):
        name, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"method {text!r}: {change!r} is not a setting; write name=value, separated by ';'.")
        found[name.strip()] = parse_value(value.strip())
    return found


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    """A list of numbers separated by commas; `name` is what an error calls one of them."""
    found = []
    for item in split_list(text):
        try:
            found.append(kind(item))
        except ValueError as error:
            raise UsageError(f"{name} {item!r} is not a number.") from error
    return found
