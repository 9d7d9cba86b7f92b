"""Every other method on every family that can have it."""

import pytest
from tiny_today import EVERY_FAMILY

from toma_diffusion import METHODS

every_case = pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, id=f"{method}-{family.name}")
        for method in METHODS
        for family in EVERY_FAMILY
        if method != "todo" or family.name in ("sd15", "sdxl", "pixart")
    ],
)
