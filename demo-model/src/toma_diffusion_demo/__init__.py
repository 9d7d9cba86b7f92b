"""A small text-to-image model, as files in diffusers format. This package holds no other code."""

from pathlib import Path

__all__ = ["model_folder"]


def model_folder() -> Path:
    """The folder that `diffusers.StableDiffusionPipeline.from_pretrained` loads."""
    return Path(__file__).with_name("model")
