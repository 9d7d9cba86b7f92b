"""Faster diffusion models without training: skipped steps that are predicted, and token merging (ToMA)."""

from toma_diffusion.api import apply_toma, remove_toma, toma_enabled
from toma_diffusion.errors import UsageError
from toma_diffusion.families import register_adapter
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.merge import Action, Grid, MergePlan, Regions, Schedule
from toma_diffusion.merge.config import PRESETS, ToMAConfig
from toma_diffusion.ops import facility_location, merge, merge_weights, unmerge
from toma_diffusion.others import METHODS
from toma_diffusion.others.todo_settings import ToDoConfig
from toma_diffusion.others.tofu_settings import ToFuConfig
from toma_diffusion.others.tomesd_settings import ToMeSDConfig
from toma_diffusion.skip.config import Skip

__version__ = "1.0.0rc1"

__all__ = [
    "METHODS",
    "PRESETS",
    "Action",
    "Grid",
    "MergePlan",
    "Regions",
    "Schedule",
    "Skip",
    "ToDoConfig",
    "ToFuConfig",
    "ToMAConfig",
    "ToMAHandle",
    "ToMeSDConfig",
    "UsageError",
    "apply_toma",
    "facility_location",
    "merge",
    "merge_weights",
    "register_adapter",
    "remove_toma",
    "toma_enabled",
    "unmerge",
]
