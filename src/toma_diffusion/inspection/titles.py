"""The title of a picture, which may hold any prompt."""

from __future__ import annotations

from typing import Any


def put_title(figure: Any, title: str) -> None:
    """Write it above a figure of matplotlib, in lines that fit, and with every dollar as it stands: a pair of them
    would begin a formula, and most prompts are no valid ones."""
    figure.suptitle(title.replace("$", r"\$"), fontsize=12, wrap=True)
