"""The method in pure torch: a grid divided into regions, a plan that merges it, a schedule, and what is
remembered from step to step."""

from toma_diffusion.merge.plan import MergePlan, Plan, gather_rows, num_destinations, why_first_frame_whole
from toma_diffusion.merge.regions import Grid, Regions
from toma_diffusion.merge.schedule import Action, Schedule

__all__ = [
    "Action",
    "Grid",
    "MergePlan",
    "Plan",
    "Regions",
    "Schedule",
    "gather_rows",
    "num_destinations",
    "why_first_frame_whole",
]
