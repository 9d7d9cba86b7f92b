"""Every other method on every family that can have it."""

import pytest
from tiny import EVERY_FAMILY, FAMILIES, Family

from toma_diffusion import METHODS


def cases(families: list[Family]) -> pytest.MarkDecorator:
    """ToDo needs keys from other tokens than queries, which joint attention does not take."""
    return pytest.mark.parametrize(
        ("method", "family"),
        [
            pytest.param(method, family, id=f"{method}-{family.name}")
            for method in METHODS
            for family in families
            if method != "todo" or family.name in ("sd15", "sdxl", "pixart")
        ],
    )


every_case = cases(EVERY_FAMILY)
first_families = cases(FAMILIES)
"""Those up to Flux.1."""
