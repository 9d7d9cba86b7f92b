"""How kernels find tokens of a region in the row-major sequence: by arithmetic, so that no tile is ever copied out."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def token_rows(region, local, LAYOUT_WIDTH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row-major indices in the grid of the tokens `local` of a `region`; see `Regions.positions`."""
    columns: tl.constexpr = LAYOUT_WIDTH // WIDTH
    row = (region // columns) * HEIGHT + local // WIDTH
    return row * LAYOUT_WIDTH + (region % columns) * WIDTH + local % WIDTH


def dense_channels(tokens: Tensor) -> Tensor:
    """Kernels step over samples and tokens by strides, over channels one by one."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def power_of_two(number: int, smallest: int = 16) -> int:
    """The power of two at or above `number`. Matrix products want 16 or more."""
    return max(smallest, 1 << (number - 1).bit_length())


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start `kernel` on `grid`, on the device of its first argument: Triton by itself takes the current one.

    Compiled code sees to the device itself.
    """
    device = arguments[0].device
    for argument in arguments[1:]:
        if isinstance(argument, Tensor) and argument.device != device:
            raise ValueError(
                f"a kernel got tensors on {device} and on {argument.device}: all must lie on one device. "
                "Models whose blocks lie on several devices cannot be merged."
            )
    if torch.compiler.is_compiling() or device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **constants)
    else:
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants)
