"""The machine and the code that a result was measured with."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch


@dataclass(frozen=True)
class Facts:
    """The machine and the code. Rows of other facts are never mixed with ours."""

    gpu: str
    torch: str
    diffusers: str
    triton: str
    toma_diffusion: str
    commit: str


def gather_facts(device: torch.device, commit: str | None = None) -> Facts:
    """Those of this machine; `commit` stands in for that of the package's checkout."""
    from toma_diffusion import __version__

    return Facts(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        diffusers=_version("diffusers"),
        triton=_version("triton"),
        toma_diffusion=__version__,
        commit=commit or head_of_package(),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def head_of_package() -> str:
    """The commit of the checkout that the package runs from; `unknown` if it is installed elsewhere."""
    package = Path(__file__).parent
    # An installed copy may lie inside another project's checkout, whose commit would say nothing.
    for command in (["ls-files", "--error-unmatch", "__init__.py"], ["rev-parse", "--short", "HEAD"]):
        try:
            result = subprocess.run(["git", *command], cwd=package, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    return result.stdout.strip()
