"""Small models of images and clips, as files. Those that diffusers cannot load alone: `toma_diffusion_demo.loading`."""

from pathlib import Path

__all__ = ["flux_folder", "four_step_folder", "model_folder", "video_folder"]


def model_folder() -> Path:
    """The folder that `diffusers.StableDiffusionPipeline.from_pretrained` loads."""
    return Path(__file__).with_name("model")


def flux_folder() -> Path:
    """The folder of the Flux-class model: transformer, autoencoder, scheduler. Load it with `loading.flux_pipeline`."""
    return Path(__file__).with_name("flux")


def four_step_folder() -> Path:
    """The folder of the weights that make four steps enough: `loading.four_step_pipeline` adds them to the model."""
    return Path(__file__).with_name("four_step")


def video_folder() -> Path:
    """The folder of the video model: transformer, autoencoder, scheduler. Load it with `loading.wan_pipeline`."""
    return Path(__file__).with_name("video")
