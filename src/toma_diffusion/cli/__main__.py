"""`python -m toma_diffusion.cli`, for launchers such as `accelerate launch -m`."""

from toma_diffusion.cli import app

app()
