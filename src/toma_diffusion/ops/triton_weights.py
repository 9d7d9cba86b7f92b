"""Merge weights of local regions: similarity and softmax over destinations in one pass, then row sums.

A = softmax over destinations of scale · S(X_T, X), M = A / row sums. S is the mean over the parts of the cosine, minus
a penalty for the distance. With hard assignment, instead of both, the index of the nearest destination of every
token. One program takes the tokens of a region, or a part of them if it is large; then a second kernel computes M.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toma_diffusion.ops.tiles import Tiling
from toma_diffusion.ops.triton_tiles import (
    channels_at_once,
    cosines,
    dense_channels,
    launch,
    penalty,
    power_of_two,
    token_rows,
)

LARGEST_WHOLE = 128
"""Tokens of a region up to which a program takes all of them."""
MOST_ELEMENTS = 16384
"""Of a block of weights that a program holds in its registers, if a region is larger."""


@triton.jit
def _weigh(
    tokens,
    destinations,
    weights,
    means,
    nearest,
    batch_stride,
    row_stride,
    num_blocks,
    DISTANCE_WEIGHT: tl.constexpr,
    IS_VIDEO: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_DESTINATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GRID_WIDTH: tl.constexpr,
    GRID_HEIGHT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HARD: tl.constexpr,
):
    program = tl.program_id(0)
    region = program % REGIONS
    slot = tl.arange(0, BLOCK_K)
    local = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_slot = slot < NUM_DESTINATIONS
    is_token = local < SIZE
    destination = tl.load(destinations + program.to(tl.int64) * NUM_DESTINATIONS + slot, mask=is_slot, other=0)
    destination = destination.to(tl.int32)
    to = token_rows(region, destination, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
    source = token_rows(region, local, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)

    similarity = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    for part in range(PARTS):
        sample = program // REGIONS + part * (num_blocks // REGIONS)
        base = tokens + sample.to(tl.int64) * batch_stride
        similarity += cosines(
            base + to * row_stride,
            base + source * row_stride,
            is_slot,
            is_token,
            CHANNELS,
            BLOCK_K,
            BLOCK_N,
            BLOCK_C,
        )
    if PARTS > 1:
        similarity = similarity / PARTS
    if DISTANCE_WEIGHT > 0:
        similarity -= penalty(to, source, DISTANCE_WEIGHT, IS_VIDEO, HEIGHT * WIDTH, DEPTH, GRID_WIDTH, GRID_HEIGHT)

    if HARD:
        similarity = tl.where(is_slot[:, None], similarity, -float("inf"))
        chosen = tl.argmax(similarity, axis=0)
        itself = tl.where((destination[:, None] == local[None, :]) & is_slot[:, None], slot[:, None], -1)
        own = tl.max(itself, axis=0)  # a destination goes to itself, also where an equal one comes before it
        chosen = tl.where(own >= 0, own, chosen)
        chosen = tl.minimum(chosen, NUM_DESTINATIONS - 1)  # also where tokens are NaN
        length: tl.constexpr = REGIONS * SIZE
        for part in range(PARTS):
            sample = program // REGIONS + part * (num_blocks // REGIONS)
            target = nearest + sample.to(tl.int64) * length + source
            tl.store(target, (region * NUM_DESTINATIONS + chosen).to(tl.int64), mask=is_token)
    else:
        logits = tl.where(is_slot[:, None], SCALE * similarity, -float("inf"))
        exponent = tl.exp(logits - tl.max(logits, axis=0)[None, :])
        share = exponent / tl.sum(exponent, axis=0)[None, :]
        share = tl.where(is_token[None, :], share, 0.0).to(weights.dtype.element_ty)
        mask = is_slot[:, None] & is_token[None, :]
        for part in range(PARTS):
            block = (program + part * num_blocks).to(tl.int64)
            offset = (block * NUM_DESTINATIONS + slot[:, None]) * SIZE + local[None, :]
            tl.store(weights + offset, share, mask=mask)
            if BLOCK_N >= SIZE:
                sums = tl.sum(share.to(tl.float32), axis=1)
                mean = share.to(tl.float32) / tl.maximum(sums, 1e-37)[:, None]
                tl.store(means + offset, mean.to(means.dtype.element_ty), mask=mask)


@triton.jit
def _divide_by_row_sums(weights, means, num_rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    offset = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    share = tl.load(weights + offset, mask=mask, other=0.0).to(tl.float32)
    mean = share / tl.maximum(tl.sum(share, axis=1), 1e-37)[:, None]
    tl.store(means + offset, mean.to(means.dtype.element_ty), mask=mask)


def weigh(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    *,
    distance_weight: float = 0.0,
    parts: int = 1,
    scale: float = 0.0,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    nearest: Tensor | None = None,
) -> None:
    """Write A and M into `weights` and `means` [B·R, k, n], or the nearest destinations into `nearest` [B, N].

    `tokens` are [B, N, d], `destinations` [B·R / parts, k] inside their regions. The parts get the same weights.
    """
    tokens = dense_channels(tokens)
    size, num_destinations, num_blocks = tiling.size, destinations.shape[1], destinations.shape[0]
    hard = nearest is not None
    block_k, block_n = power_of_two(num_destinations), power_of_two(size)
    if size > LARGEST_WHOLE:
        block_n = max(16, min(64, MOST_ELEMENTS // block_k))
    launch(
        _weigh,
        (num_blocks, triton.cdiv(size, block_n)),
        tokens,
        destinations,
        nearest if weights is None else weights,
        nearest if means is None else means,
        nearest if hard else weights,
        tokens.stride(0),
        tokens.stride(1),
        num_blocks,
        DISTANCE_WEIGHT=distance_weight,
        IS_VIDEO=tiling.num_frames > 1,
        PARTS=parts,
        SCALE=scale,
        SIZE=size,
        NUM_DESTINATIONS=num_destinations,
        CHANNELS=tokens.shape[2],
        REGIONS=tiling.num_regions,
        LAYOUT_WIDTH=tiling.layout_width,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        FRAME_ROWS=tiling.frame_rows,
        DEPTH=tiling.depth,
        GRID_WIDTH=tiling.grid_width,
        GRID_HEIGHT=tiling.grid_height,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_C=channels_at_once(tokens) if block_k <= 256 else 32,
        HARD=hard,
        num_warps=8 if block_k * block_n > 4096 else 4,
    )
    if weights is not None and means is not None and block_n < size:
        rows = weights.shape[0] * num_destinations
        launch(
            _divide_by_row_sums,
            (triton.cdiv(rows, 8),),
            weights,
            means,
            rows,
            SIZE=size,
            ROWS=8,
            BLOCK_N=power_of_two(size),
            num_warps=4,
        )
