"""Merge and unmerge of local regions: all regions in one launch, tiles read and written in place.

`merge` is M X, `unmerge` Aᵀ Y, and with a residual R + Aᵀ Y, rounded once; both by a block per region. Small regions
are taken several at a time as one block-diagonal product, because a matrix unit wants 16 rows. `merge_members` is M X
for a hard assignment: the mean of each destination's members, found by an index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toma_diffusion.ops.tiles import Tiling
from toma_diffusion.ops.triton_tiles import dense_channels, launch, power_of_two, token_rows

BLOCK_C = 128
"""Channels a program works on. With 4 warps the best of 64, 128, 256 × 2, 4, 8 on an H200, or within 5 % of it."""
BLOCK_ROWS = 64
"""Most tokens, and most destinations, a program takes at once."""


@triton.jit
def _merge(
    tokens,
    means,
    merged,
    batch_stride,
    row_stride,
    num_blocks,
    SIZE: tl.constexpr,
    NUM_DESTINATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    first = tl.program_id(0) * GROUP
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)  # destinations of the group, region after region
    to_region = first + slot // NUM_DESTINATIONS
    is_slot = (slot < GROUP * NUM_DESTINATIONS) & (to_region < num_blocks)
    is_channel = channel < CHANNELS
    result = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for start in range(0, GROUP * SIZE, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)  # tokens of the group, region after region
        region = first + index // SIZE
        is_token = (index < GROUP * SIZE) & (region < num_blocks)
        row = token_rows(region % REGIONS, index % SIZE, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
        pointers = tokens + (region // REGIONS).to(tl.int64) * batch_stride + row * row_stride
        x = tl.load(pointers[:, None] + channel[None, :], mask=is_token[:, None] & is_channel[None, :], other=0.0)
        offset = (to_region * NUM_DESTINATIONS + slot % NUM_DESTINATIONS)[:, None] * SIZE + (index % SIZE)[None, :]
        mask = is_slot[:, None] & is_token[None, :] & (to_region[:, None] == region[None, :])
        share = tl.load(means + offset, mask=mask, other=0.0)
        result = tl.dot(share.to(x.dtype), x, result, input_precision="ieee")
    place = (to_region * NUM_DESTINATIONS + slot % NUM_DESTINATIONS).to(tl.int64) * CHANNELS
    mask = is_slot[:, None] & is_channel[None, :]
    tl.store(merged + place[:, None] + channel[None, :], result.to(merged.dtype.element_ty), mask=mask)


@triton.jit
def _unmerge(
    merged,
    weights,
    residual,
    result,
    merged_batch_stride,
    merged_row_stride,
    residual_batch_stride,
    residual_row_stride,
    num_blocks,
    SIZE: tl.constexpr,
    NUM_DESTINATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    first = tl.program_id(0) * GROUP
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    region = first + index // SIZE
    is_token = (index < GROUP * SIZE) & (region < num_blocks)
    is_channel = channel < CHANNELS
    tokens = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, GROUP * NUM_DESTINATIONS, BLOCK_K):
        slot = start + tl.arange(0, BLOCK_K)
        to_region = first + slot // NUM_DESTINATIONS
        is_slot = (slot < GROUP * NUM_DESTINATIONS) & (to_region < num_blocks)
        place = (to_region % REGIONS) * NUM_DESTINATIONS + slot % NUM_DESTINATIONS
        pointers = merged + (to_region // REGIONS).to(tl.int64) * merged_batch_stride + place * merged_row_stride
        y = tl.load(pointers[:, None] + channel[None, :], mask=is_slot[:, None] & is_channel[None, :], other=0.0)
        offset = (to_region * NUM_DESTINATIONS + slot % NUM_DESTINATIONS)[None, :] * SIZE + (index % SIZE)[:, None]
        mask = is_token[:, None] & is_slot[None, :] & (to_region[None, :] == region[:, None])
        share = tl.load(weights + offset, mask=mask, other=0.0)
        tokens = tl.dot(share.to(y.dtype), y, tokens, input_precision="ieee")
    row = token_rows(region % REGIONS, index % SIZE, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
    sample = (region // REGIONS).to(tl.int64)
    mask = is_token[:, None] & is_channel[None, :]
    if HAS_RESIDUAL:
        pointers = residual + sample * residual_batch_stride + row * residual_row_stride
        tokens += tl.load(pointers[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    length: tl.constexpr = REGIONS * SIZE
    pointers = result + (sample * length + row) * CHANNELS
    tl.store(pointers[:, None] + channel[None, :], tokens.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _merge_members(
    tokens,
    members,
    offsets,
    merged,
    batch_stride,
    row_stride,
    num_tokens,
    num_destinations,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    destination = tl.program_id(0)
    sample = destination // num_destinations
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(offsets + destination)
    end = tl.load(offsets + destination + 1)
    base = tokens + sample.to(tl.int64) * batch_stride
    total = tl.zeros((BLOCK_C,), tl.float32)
    count = (end - start).to(tl.float32)
    while start < end:  # two by two: most destinations have one or two members
        place = start + tl.arange(0, 2)
        row = tl.load(members + place, mask=place < end, other=0) - sample * num_tokens
        mask = (place < end)[:, None] & (channel < CHANNELS)[None, :]
        x = tl.load(base + (row * row_stride)[:, None] + channel[None, :], mask=mask, other=0.0)
        total += tl.sum(x.to(tl.float32), axis=0)
        start += 2
    mean = (total / tl.maximum(count, 1.0)).to(merged.dtype.element_ty)
    tl.store(merged + destination.to(tl.int64) * CHANNELS + channel, mean, mask=channel < CHANNELS)


def merge(tokens: Tensor, means: Tensor, tiling: Tiling) -> Tensor:
    """M X: `[B, N, C]` and M `[B·R, k, n]` -> `[B, D, C]`; `tiling` is `Regions.tiling`."""
    tokens = dense_channels(tokens)
    batch, _, channels = tokens.shape
    blocks, num_destinations, size = means.shape
    merged = torch.empty(batch, blocks // batch * num_destinations, channels, dtype=tokens.dtype, device=tokens.device)
    group = _group(size)
    block_k = min(BLOCK_ROWS, power_of_two(group * num_destinations))
    grid = (
        triton.cdiv(blocks, group),
        triton.cdiv(channels, BLOCK_C),
        triton.cdiv(group * num_destinations, block_k),
    )
    launch(
        _merge,
        grid,
        tokens,
        means,
        merged,
        tokens.stride(0),
        tokens.stride(1),
        blocks,
        SIZE=size,
        NUM_DESTINATIONS=num_destinations,
        CHANNELS=channels,
        REGIONS=blocks // batch,
        LAYOUT_WIDTH=tiling.layout_width,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        FRAME_ROWS=tiling.frame_rows,
        DEPTH=tiling.depth,
        GROUP=group,
        BLOCK_K=block_k,
        BLOCK_N=min(BLOCK_ROWS, power_of_two(group * size)),
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return merged


def unmerge(merged: Tensor, weights: Tensor, tiling: Tiling, residual: Tensor | None = None) -> Tensor:
    """Aᵀ Y, or R + Aᵀ Y: `[B, D, C]` and A `[B·R, k, n]` -> `[B, N, C]`; `tiling` is `Regions.tiling`."""
    merged = dense_channels(merged)
    residual = None if residual is None else dense_channels(residual)
    batch, _, channels = merged.shape
    blocks, num_destinations, size = weights.shape
    dtype = merged.dtype if residual is None else torch.promote_types(merged.dtype, residual.dtype)
    result = torch.empty(batch, blocks // batch * size, channels, dtype=dtype, device=merged.device)
    group = _group(size)
    block_n = min(BLOCK_ROWS, power_of_two(group * size))
    grid = (triton.cdiv(blocks, group), triton.cdiv(channels, BLOCK_C), triton.cdiv(group * size, block_n))
    added = merged if residual is None else residual
    launch(
        _unmerge,
        grid,
        merged,
        weights,
        added,
        result,
        merged.stride(0),
        merged.stride(1),
        added.stride(0),
        added.stride(1),
        blocks,
        SIZE=size,
        NUM_DESTINATIONS=num_destinations,
        CHANNELS=channels,
        REGIONS=blocks // batch,
        LAYOUT_WIDTH=tiling.layout_width,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        FRAME_ROWS=tiling.frame_rows,
        DEPTH=tiling.depth,
        GROUP=group,
        BLOCK_K=min(BLOCK_ROWS, power_of_two(group * num_destinations)),
        BLOCK_N=block_n,
        BLOCK_C=BLOCK_C,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return result


def merge_members(tokens: Tensor, members: Tensor, offsets: Tensor, num_destinations: int) -> Tensor:
    """The mean of every destination's members: `[B, N, C]` -> `[B, D, C]`.

    `members` are the B·N tokens of all samples sorted by destination; those of the d-th of all B·D destinations stand
    from `offsets[d]` to `offsets[d + 1]`.
    """
    tokens = dense_channels(tokens)
    batch, length, channels = tokens.shape
    merged = torch.empty(batch, num_destinations, channels, dtype=tokens.dtype, device=tokens.device)
    # One warp a program: the best of 1, 2, 4 × 256, 512, 1024 channels × 1, 2, 4, 8 members at once on an H200.
    block_c = power_of_two(channels) if channels <= 1024 else 512
    launch(
        _merge_members,
        (batch * num_destinations, triton.cdiv(channels, block_c)),
        tokens,
        members,
        offsets,
        merged,
        tokens.stride(0),
        tokens.stride(1),
        length,
        num_destinations,
        CHANNELS=channels,
        BLOCK_C=block_c,
        num_warps=1,
    )
    return merged


def _group(size: int) -> int:
    """How many regions a program takes: as many as fill a matrix unit's 16 rows."""
    return max(1, 16 // size)
