"""The title of a figure, which may contain any prompt."""

from __future__ import annotations

from typing import Any


def put_title(figure: Any, title: str) -> None:
    """Put a title above a matplotlib figure, wrapped to its width. Dollar signs are escaped: matplotlib would read what
    is between two of them as a formula."""
    figure.suptitle(title.replace("$", r"\$"), fontsize=12, wrap=True)
