"""`toma env`: what a bug report or a benchmark row needs to say about the machine."""

import platform
from importlib import metadata

PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "torchmetrics", "numpy")


def env() -> None:
    """Print versions and hardware, to paste into a bug report."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from toma_diffusion import __version__

    table = Table(show_header=False, box=None)
    table.add_row("toma-diffusion", __version__)
    table.add_row("python", platform.python_version())
    table.add_row("system", platform.platform())
    for package in PACKAGES:
        try:
            table.add_row(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            table.add_row(package, "not installed")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    table.add_row("GPU", ", ".join(gpus) or "none")
    Console().print(table)
