"""The settings of every method: frozen, validated, pure data. One method a file."""

from toma_diffusion.config.base import SITES, Config
from toma_diffusion.config.learned import Learned, LearnedSteps, Weights
from toma_diffusion.config.skip import Skip
from toma_diffusion.config.todo import ToDoConfig
from toma_diffusion.config.tofu import ToFuConfig
from toma_diffusion.config.toma import PRESETS, REGIONS, ToMAConfig
from toma_diffusion.config.tomesd import ToMeSDConfig

__all__ = [
    "PRESETS",
    "REGIONS",
    "SITES",
    "Config",
    "Learned",
    "LearnedSteps",
    "Skip",
    "ToDoConfig",
    "ToFuConfig",
    "ToMAConfig",
    "ToMeSDConfig",
    "Weights",
]
