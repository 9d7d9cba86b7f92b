"""Two lower bounds of ToMA's time. They turn images into noise, so they are not presets."""

from __future__ import annotations

from dataclasses import replace

from toma_diffusion.merge.base import Config
from toma_diffusion.merge.config import ToMAConfig
from toma_diffusion.others import method_of
from toma_lab.experiments.cells import Cell

LOWER_BOUND, FLOOR = "lower-bound", "floor"
DEFAULTS = ToMAConfig()


def bounds_of(config: Config) -> tuple[Cell | None, Cell | None]:
    """The lower bound and the floor of a method's time; methods other than ToMA have none.

    The lower bound has fixed random projections: nothing is selected or weighed. The floor slices tokens away: nothing
    is merged either. What makes no difference to them has its default value, so that methods share them.
    """
    if method_of(config).name != "toma":
        return None, None
    settings = config.to_dict()
    shared = ("ratio", "scope", "sites", "window", "min_tokens", "skip_blocks")
    floor = ToMAConfig(selection="slice", **{name: settings[name] for name in shared})
    lower_bound = replace(
        ToMAConfig.from_dict(settings),
        selection="none",
        select_every=DEFAULTS.select_every,
        reweigh_every=DEFAULTS.reweigh_every,
    )
    return Cell(LOWER_BOUND, lower_bound), Cell(FLOOR, floor)
