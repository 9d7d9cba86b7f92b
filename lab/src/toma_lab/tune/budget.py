"""How much a search measures: small, medium or large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from toma_diffusion.checks import check_one_of


@dataclass(frozen=True)
class Budget:
    """The size of every stage."""

    map_groups: int
    """Most groups of consecutive blocks on the map of sensitivity."""
    map_steps: int
    """Most steps on it."""
    learning: int
    """How long other steps and weights are tried in learning to predict skipped steps: as long as so many images
    take."""
    rungs: tuple[int, ...]
    """Images, or clips, of each candidate after every rung of the search. After each about half of the candidates go
    on."""
    climbs: int
    """Rounds in which the computed steps of the best candidate that skips steps are moved."""
    finalists: int
    """Candidates that are measured on images of their own at the end."""
    final_images: int
    """How many images those are."""

    @property
    def images(self) -> int:
        """All, of the search and of the end."""
        return self.rungs[-1] + self.final_images


BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "small": Budget(map_groups=5, map_steps=4, learning=4, rungs=(1, 2, 4), climbs=1, finalists=3, final_images=4),
        "medium": Budget(
            map_groups=8, map_steps=6, learning=20, rungs=(1, 2, 4), climbs=2, finalists=5, final_images=8
        ),
        "large": Budget(
            map_groups=12, map_steps=8, learning=80, rungs=(2, 4, 8), climbs=4, finalists=8, final_images=24
        ),
    }
)
CLIP_BUDGETS: Mapping[str, Budget] = MappingProxyType(
    {
        "small": Budget(map_groups=4, map_steps=3, learning=0, rungs=(1,), climbs=0, finalists=3, final_images=1),
        "medium": Budget(map_groups=6, map_steps=4, learning=4, rungs=(1, 2), climbs=1, finalists=4, final_images=2),
        "large": Budget(map_groups=8, map_steps=6, learning=12, rungs=(1, 2, 4), climbs=2, finalists=6, final_images=4),
    }
)
"""The same of clips, each of which takes as long as many images."""


def find_budget(name: str, *, clips: bool = False) -> Budget:
    """The budget of that name, of images or of clips."""
    check_one_of("budget", name, tuple(BUDGETS))
    return (CLIP_BUDGETS if clips else BUDGETS)[name]
