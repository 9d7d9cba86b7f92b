"""Every other method on every family that can have it."""

from typing import Any

import pytest
from tiny import EVERY_FAMILY, FAMILIES, Family

from toma_diffusion import Handle, speed_up
from toma_diffusion.others import METHODS

NAMES = ("tomesd", "tofu", "todo")
SETTINGS = {
    "tomesd": {"ratio": 0.5, "seed": 1, "skip_blocks": ()},
    "tofu": {"ratio": 0.5, "seed": 1, "skip_blocks": ()},
    "todo": {"ratio": 0.75, "skip_blocks": ()},
}
every_method = pytest.mark.parametrize("method", NAMES)


def applied(model: Any, method: str, **changes: Any) -> Handle:
    """The model with a method, with `SETTINGS` and these changes."""
    return speed_up(model, merge=METHODS[method](**SETTINGS[method] | changes))


def cases(families: list[Family]) -> pytest.MarkDecorator:
    """ToDo needs keys from other tokens than queries, which joint attention does not take."""
    return pytest.mark.parametrize(
        ("method", "family"),
        [
            pytest.param(method, family, id=f"{method}-{family.name}")
            for method in NAMES
            for family in families
            if method != "todo" or family.name in ("sd15", "sdxl", "pixart")
        ],
    )


every_case = cases(EVERY_FAMILY)
first_families = cases(FAMILIES)
"""Those up to Flux.1."""
