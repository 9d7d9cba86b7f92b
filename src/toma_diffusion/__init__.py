"""Faster diffusion models without training: skipped steps that are predicted, and token merging (ToMA)."""

from toma_diffusion.api import apply_toma, speed_up
from toma_diffusion.errors import UsageError
from toma_diffusion.handle import Handle
from toma_diffusion.merge.config import Merge
from toma_diffusion.skip.config import Skip

__version__ = "1.0.0rc1"

__all__ = ["Handle", "Merge", "Skip", "UsageError", "apply_toma", "speed_up"]
