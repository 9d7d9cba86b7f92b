"""Chooses the implementation of the operators for a device."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec

import torch

OLDEST_GPU = (7, 0)
"""The lowest compute capability that Triton supports."""
LARGEST_IN_REGISTERS = 128
"""Tokens of a region up to which one kernel computes the similarity and chooses: 128² float32 in 8 warps' registers
are 64 a thread. Up to `LARGEST_SELECTED` two kernels do it, by a similarity in memory."""
LARGEST_SELECTED = 1024
"""Tokens of a region up to which kernels choose destinations."""
LARGEST_WEIGHED = 1024
"""Tokens of a region up to which a kernel computes the weights."""


@cache
def choose_backend(asked: str, device: torch.device, dtype: torch.dtype) -> str:
    """`torch` or `triton`, for the requested backend. Warns once if `triton` was expected and cannot run."""
    if asked == "torch" or (asked == "auto" and device.type != "cuda"):
        return "torch"
    reason = _why_not_triton(device, dtype)
    if reason is None:
        return "triton"
    warnings.warn(
        f"token merging runs in plain torch, without its fused kernels (backend={asked!r}): {reason}. "
        "Choose backend='torch' to silence this.",
        stacklevel=2,
    )
    return "torch"


def _why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels know float16, bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if find_spec("triton") is None:
        return "triton is not installed (on Linux, pip install triton)"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None  # for tests: Triton then runs kernels on the CPU, very slowly
    if device.type != "cuda":
        return f"the kernels need an NVIDIA GPU, and the tokens are on {device.type!r}"
    if torch.version.hip is not None:
        return "the kernels have not been tried on AMD GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and Triton needs 7.0"
    return None
