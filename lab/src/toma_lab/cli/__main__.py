"""`python -m toma_lab.cli`, for launchers such as `accelerate launch -m`."""

from toma_lab.cli import app

app()
