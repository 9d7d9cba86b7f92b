"""What the kernels share: how they find tokens of a region in the row-major sequence (by arithmetic, so that no tile is
ever copied out), cosines and distances, and how they are started."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def token_rows(
    region,
    local,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Row-major indices in the grid of the tokens `local` of a `region`; see `Tiling.positions`."""
    columns: tl.constexpr = LAYOUT_WIDTH // WIDTH
    if DEPTH == 1:  # frames lie one below the other, and regions never go over the end of one
        row = (region // columns) * HEIGHT + local // WIDTH
    else:
        rows: tl.constexpr = FRAME_ROWS // HEIGHT
        frame = region // (rows * columns) * DEPTH + local // (HEIGHT * WIDTH)
        row = frame * FRAME_ROWS + (region // columns) % rows * HEIGHT + local % (HEIGHT * WIDTH) // WIDTH
    return row * LAYOUT_WIDTH + (region % columns) * WIDTH + local % WIDTH


@triton.jit
def penalty(
    left,
    right,
    DISTANCE_WEIGHT: tl.constexpr,
    IS_VIDEO: tl.constexpr,
    AREA: tl.constexpr,
    DEPTH: tl.constexpr,
    GRID_WIDTH: tl.constexpr,
    GRID_HEIGHT: tl.constexpr,
):
    """What the distance of tokens at row-major indices takes off their similarity; see `Tiling.penalty`."""
    left_row, right_row = left // GRID_WIDTH, right // GRID_WIDTH
    down = (left_row % GRID_HEIGHT).to(tl.float32)[:, None] - (right_row % GRID_HEIGHT).to(tl.float32)[None, :]
    across = (left % GRID_WIDTH).to(tl.float32)[:, None] - (right % GRID_WIDTH).to(tl.float32)[None, :]
    total = DISTANCE_WEIGHT * ((down * down + across * across) / AREA)
    if IS_VIDEO:
        later = (left_row // GRID_HEIGHT).to(tl.float32)[:, None] - (right_row // GRID_HEIGHT).to(tl.float32)[None, :]
        total += DISTANCE_WEIGHT * (later * later / (DEPTH * DEPTH))
    return total


@triton.jit
def norms(rows, is_row, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Lengths of the rows pointed to."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        mask = is_row[:, None] & (channel[None, :] < CHANNELS)
        x = tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, axis=1)
    return tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit
def cosines(
    left,
    right,
    is_left,
    is_right,
    CHANNELS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """cos(x_i, x_j) of the rows that `left` and `right` point to: [BLOCK_I, BLOCK_J].

    Norms are computed in loops of their own. In one loop with the products, Triton 3.6 gave wrong products on an H200:
    with half-precision tokens, in some block sizes, for single tokens. Without pipelining (num_stages=1) they were
    right: it seems to overwrite what a product still reads.
    """
    products = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        is_channel = channel[None, :] < CHANNELS
        x = tl.load(left[:, None] + channel[None, :], mask=is_left[:, None] & is_channel, other=0.0)
        y = tl.load(right[:, None] + channel[None, :], mask=is_right[:, None] & is_channel, other=0.0)
        products = tl.dot(x, tl.trans(y), products, input_precision="ieee")
    left_norm = norms(left, is_left, CHANNELS, BLOCK_I, BLOCK_C)
    right_norm = norms(right, is_right, CHANNELS, BLOCK_J, BLOCK_C)
    return products / (left_norm[:, None] * right_norm[None, :])


def dense_channels(tokens: Tensor) -> Tensor:
    """Kernels step over samples and tokens by strides, over channels one by one."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def channels_at_once(tokens: Tensor) -> int:
    """How many channels a product takes at once."""
    return 32 if tokens.element_size() >= 4 else 64


def power_of_two(number: int) -> int:
    """The power of two at or above `number`, at least 16: matrix products want that."""
    return max(16, 1 << (number - 1).bit_length())


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
