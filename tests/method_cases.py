"""Every other method on every family that can have it."""

from typing import Any

import pytest
from tiny import FAMILIES, Family

from toma_diffusion import Handle, speed_up
from toma_diffusion.others import METHODS

NAMES = ("tomesd", "tofu", "todo")
SETTINGS = {
    "tomesd": {"ratio": 0.5, "seed": 1, "skip_blocks": ()},
    "tofu": {"ratio": 0.5, "seed": 1, "skip_blocks": ()},
    "todo": {"ratio": 0.75, "skip_blocks": ()},
}
TAKES = {"tofu": ("sd15", "flux", "z-image"), "todo": ("sd15", "sdxl", "pixart")}
"""ToFu has the placement of ToMeSD, and is tried on one family of each kind. ToDo needs keys from other tokens than
queries, which joint attention does not take."""
every_method = pytest.mark.parametrize("method", NAMES)


def applied(model: Any, method: str, **changes: Any) -> Handle:
    """The model with a method, with `SETTINGS` and these changes."""
    return speed_up(model, merge=METHODS[method](**SETTINGS[method] | changes))


def cases(families: list[Family]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("method", "family"),
        [
            pytest.param(method, family, id=f"{method}-{family.name}")
            for method in NAMES
            for family in families
            if family.name in TAKES.get(method, [family.name])
        ],
    )


first_families = cases(FAMILIES)
"""Those up to Flux.1."""
