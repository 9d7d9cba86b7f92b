"""Chooses what runs the operators: plain torch or the Triton kernels.

`choose_backend` says once for a plan whether kernels can run at all, `backend_of` for each operator whether its kernel
runs. The operators ask it, and so does `summary()`.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from toma_diffusion.ops.tiles import Tiling

OLDEST_GPU = (7, 0)
"""The lowest compute capability that Triton supports."""
LARGEST_IN_REGISTERS = 128
"""Tokens of a region up to which one kernel computes the similarity and chooses: 128² float32 in 8 warps' registers
are 64 a thread. Up to `LARGEST_SELECTED` two kernels do it, by a similarity in memory."""
LARGEST_SELECTED = 1024
"""Tokens of a region up to which kernels choose destinations."""
LARGEST_WEIGHED = 1024
"""Tokens of a region up to which a kernel computes the weights."""
MOST_WEIGHTS = 2**31
"""The merging kernels count weights in 32 bits. A few large regions of a long video have more."""
_WHOLE_GRID = "one product over the whole grid, which torch's library does fastest"


class Backend(NamedTuple):
    """What runs one operator."""

    name: str
    """`torch` or `triton`."""
    reason: str = ""
    """Why it is not the kernel, if a kernel was requested."""


def backend_of(
    operator: str, backend: str, tiling: Tiling, *, num_weights: int = 0, hard: bool = False, gradients: bool = False
) -> Backend:
    """What runs an operator, and why it is not the kernel.

    In compiled code, small regions are merged and unmerged by neither: see `regional.LARGEST_UNROLLED`.

    Args:
        operator: `selection`, `weights`, `merging` or `unmerging`.
        backend: `torch`, or `triton` where kernels can run.
        tiling: the regions in which destinations are selected; of the other operators, those in which tokens merge.
        num_weights: elements of the weights, for merging and unmerging.
        hard: whether tokens are merged by an index, not by weights.
        gradients: whether autograd must follow the tensors.
    """
    if backend == "torch":
        return Backend("torch")
    if operator in ("merging", "unmerging"):
        reason = _why_not_merging(operator, tiling, num_weights, hard, gradients)
    elif operator == "weights" and tiling.num_regions == 1:
        reason = _WHOLE_GRID
    else:
        largest = LARGEST_SELECTED if operator == "selection" else LARGEST_WEIGHED
        fits = tiling.size <= largest
        reason = "" if fits else f"regions of {tiling.size} tokens; the kernel takes up to {largest}"
    return Backend("torch", reason) if reason else Backend("triton")


def _why_not_merging(operator: str, tiling: Tiling, num_weights: int, hard: bool, gradients: bool) -> str:
    if hard and operator == "unmerging":
        return "a copy by an index, which torch's library does fastest"
    if not hard and tiling.num_regions == 1:
        return _WHOLE_GRID
    if num_weights >= MOST_WEIGHTS:
        return f"{num_weights} weights; the kernel takes fewer than {MOST_WEIGHTS}"
    return "gradients were needed, and the kernels have no backward pass" if gradients else ""


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
