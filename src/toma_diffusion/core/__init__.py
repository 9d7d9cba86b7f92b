"""The method in pure torch: a grid divided into regions, a plan that merges it, a schedule that updates the plan."""

from toma_diffusion.core.plan import MergePlan, Plan, num_destinations
from toma_diffusion.core.regions import Grid, Regions
from toma_diffusion.core.schedule import Action, Schedule

__all__ = ["Action", "Grid", "MergePlan", "Plan", "Regions", "Schedule", "num_destinations"]
