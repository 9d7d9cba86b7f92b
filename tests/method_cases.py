"""Every other method on every family that can have it."""

import pytest
from tiny import FAMILIES

from toma_diffusion import METHODS

every_case = pytest.mark.parametrize(
    ("method", "family"),
    [
        pytest.param(method, family, id=f"{method}-{family.name}")
        for method in METHODS
        for family in FAMILIES
        if method != "todo" or family.name not in ("flux", "sd3")
    ],
)
