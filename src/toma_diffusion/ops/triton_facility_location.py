"""Greedy facility location, one program a region: all picks in one launch, nothing goes to the host.

S_ij is the mean over the parts of cos(x_i, x_j), minus a penalty for the distance of i and j. Then k times: pick the
i of the largest Σ_j max(0, S_ij − c_j), raise c_j to S_ij. Half-precision products are exact in the float32 they
are summed in, so tensor cores lose nothing here.

Small regions keep S in registers, and compute all gains anew for every pick. Large ones keep it in memory, and change
the gains by those tokens alone that a pick covers better: of 256 tokens few, after the first picks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toma_diffusion.ops.backend import LARGEST_IN_REGISTERS
from toma_diffusion.ops.reference import LEAST_COSINE, TIE
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

_TIE = tl.constexpr(TIE)
_CHANGED_AT_ONCE = 16
"""Rows of S that are read together."""


@triton.jit
def _first_of_the_largest(gain, index, SIZE: tl.constexpr):
    """The lowest index whose gain is largest, or as good as."""
    largest = tl.max(gain, axis=0)
    return tl.min(tl.where(gain >= largest - _TIE, index, SIZE - 1), axis=0)


@triton.jit
def _select_in_registers(
    tokens,
    picks,
    batch_stride,
    row_stride,
    part_stride,
    DISTANCE_WEIGHT: tl.constexpr,
    IS_VIDEO: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_SELECT: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GRID_WIDTH: tl.constexpr,
    GRID_HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    valid = index < SIZE
    rows = token_rows(program % REGIONS, index, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
    base = tokens + (program // REGIONS).to(tl.int64) * batch_stride
    similarity = tl.zeros((BLOCK, BLOCK), tl.float32)
    for part in range(PARTS):
        pointers = base + tl.cast(part, tl.int64) * part_stride + rows[:, None] * row_stride
        products = tl.zeros((BLOCK, BLOCK), tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            channel = start + tl.arange(0, BLOCK_C)
            mask = valid[:, None] & (channel[None, :] < CHANNELS)
            block = tl.load(pointers + channel[None, :], mask=mask, other=0.0)
            products = tl.dot(block, tl.trans(block), products, input_precision="ieee")
        squares = tl.where(index[:, None] == index[None, :], products, 0.0)
        norm = tl.maximum(tl.sqrt(tl.sum(squares, axis=1)), 1e-12)
        norm_of_column = tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), 1e-12)
        similarity += products / (norm[:, None] * norm_of_column[None, :])
    if PARTS > 1:
        similarity = similarity / PARTS
    if DISTANCE_WEIGHT > 0:
        similarity -= penalty(rows, rows, DISTANCE_WEIGHT, IS_VIDEO, HEIGHT * WIDTH, DEPTH, GRID_WIDTH, GRID_HEIGHT)
    similarity = tl.where(valid[None, :], similarity, LEAST)  # what is not a token is covered from the start

    coverage = tl.full((BLOCK,), LEAST, tl.float32)
    chosen = index >= SIZE
    for step in range(NUM_SELECT):
        gain = tl.sum(tl.maximum(similarity - coverage[None, :], 0.0), axis=1)
        gain = tl.where(gain == gain, gain, 0.0)  # a NaN must not lead to an index outside the region
        pick = _first_of_the_largest(tl.where(chosen, -1.0, gain), index, SIZE)
        tl.store(picks + program.to(tl.int64) * NUM_SELECT + step, pick.to(tl.int64))
        row = tl.max(tl.where(index[:, None] == pick, similarity, -float("inf")), axis=0)
        coverage = tl.maximum(coverage, row)
        chosen = chosen | (index == pick)


@triton.jit
def _measure(
    tokens,
    distances,
    batch_stride,
    row_stride,
    part_stride,
    DISTANCE_WEIGHT: tl.constexpr,
    IS_VIDEO: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FRAME_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GRID_WIDTH: tl.constexpr,
    GRID_HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """1 − S of a region, a square of it a program."""
    program = tl.program_id(0)
    left = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    right = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_left, is_right = left < SIZE, right < SIZE
    left_rows = token_rows(program % REGIONS, left, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
    right_rows = token_rows(program % REGIONS, right, LAYOUT_WIDTH, HEIGHT, WIDTH, FRAME_ROWS, DEPTH)
    base = tokens + (program // REGIONS).to(tl.int64) * batch_stride
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for part in range(PARTS):
        here = base + tl.cast(part, tl.int64) * part_stride
        total += cosines(
            here + left_rows * row_stride,
            here + right_rows * row_stride,
            is_left,
            is_right,
            CHANNELS,
            BLOCK,
            BLOCK,
            BLOCK_C,
        )
    if PARTS > 1:
        total = total / PARTS
    if DISTANCE_WEIGHT > 0:
        total -= penalty(
            left_rows, right_rows, DISTANCE_WEIGHT, IS_VIDEO, HEIGHT * WIDTH, DEPTH, GRID_WIDTH, GRID_HEIGHT
        )
    place = distances + program.to(tl.int64) * SIZE * SIZE + left[:, None] * SIZE + right[None, :]
    tl.store(place, (1.0 - total).to(distances.dtype.element_ty), mask=is_left[:, None] & is_right[None, :])


@triton.jit
def _select_from_memory(
    distances,
    changes,
    picks,
    MOST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_SELECT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The picks, by 1 − S in memory: [TOKENS, CANDIDATES], one symmetric square or several on top of each other.

    In these terms the gain of i is Σ_j max(0, u_j − D_ij), where u_j is how far j is from the nearest pick so far.
    `changes` holds, for the tokens that come nearer by the last pick: their indices, u before and after.
    """
    program = tl.program_id(0)
    base = distances + program.to(tl.int64) * CANDIDATES * TOKENS
    changed_tokens = changes + program.to(tl.int64) * 3 * BLOCK_J
    before = changed_tokens + BLOCK_J
    after = before + BLOCK_J
    candidate = tl.arange(0, BLOCK_I)
    is_candidate = candidate < CANDIDATES
    token = tl.arange(0, BLOCK_J)
    is_token = token < TOKENS
    # By symmetry, the distances of a square's tokens to a candidate are that candidate's row: one run of memory.
    to_pick = base + (token // CANDIDATES) * CANDIDATES * CANDIDATES + token % CANDIDATES
    chosen = candidate >= CANDIDATES
    uncovered = tl.full((BLOCK_J,), MOST, tl.float32)
    gain = tl.zeros((BLOCK_I,), tl.float32)
    for start in range(0, TOKENS, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < TOKENS)[:, None] & is_candidate[None, :]
        block = tl.load(base + row[:, None] * CANDIDATES + candidate[None, :], mask=mask, other=MOST)
        gain += tl.sum(MOST - block.to(tl.float32), axis=0)

    for step in range(NUM_SELECT):
        valued = tl.where(gain == gain, gain, 0.0)  # a NaN must not lead to an index outside the region
        pick = _first_of_the_largest(tl.where(chosen, -1.0, valued), candidate, CANDIDATES)
        tl.store(picks + program.to(tl.int64) * NUM_SELECT + step, pick.to(tl.int64))
        chosen = chosen | (candidate == pick)
        distance = tl.load(to_pick + pick * CANDIDATES, mask=is_token, other=MOST).to(tl.float32)
        is_changed = distance < uncovered
        place = tl.cumsum(is_changed.to(tl.int32), axis=0)
        count = tl.max(place, axis=0)
        tl.debug_barrier()  # all have read the last changes
        tl.store(changed_tokens + place - 1, token.to(tl.float32), mask=is_changed)
        tl.store(before + place - 1, uncovered, mask=is_changed)
        tl.store(after + place - 1, distance, mask=is_changed)
        uncovered = tl.minimum(uncovered, distance)
        if count * 4 > TOKENS:
            # While a pick changes much, gains are large: they are computed anew, so that no rounding error stays.
            tl.debug_barrier()
            tl.store(after + token, uncovered, mask=is_token)
            tl.debug_barrier()
            gain = tl.zeros((BLOCK_I,), tl.float32)
            for start in range(0, TOKENS, ROWS):
                row = start + tl.arange(0, ROWS)
                mask = (row < TOKENS)[:, None] & is_candidate[None, :]
                block = tl.load(base + row[:, None] * CANDIDATES + candidate[None, :], mask=mask, other=MOST)
                new = tl.load(after + row, mask=row < TOKENS, other=0.0)
                gain += tl.sum(tl.maximum(new[:, None] - block.to(tl.float32), 0.0), axis=0)
        else:
            tl.debug_barrier()  # the changes are there before any is read
            for start in range(0, count, ROWS):
                slot = start + tl.arange(0, ROWS)
                is_slot = slot < count
                row = tl.load(changed_tokens + slot, mask=is_slot, other=0.0).to(tl.int32)
                old = tl.load(before + slot, mask=is_slot, other=0.0)
                new = tl.load(after + slot, mask=is_slot, other=0.0)
                mask = is_slot[:, None] & is_candidate[None, :]
                block = tl.load(base + row[:, None] * CANDIDATES + candidate[None, :], mask=mask, other=MOST)
                block = block.to(tl.float32)
                gain -= tl.sum(tl.maximum(old[:, None] - block, 0.0) - tl.maximum(new[:, None] - block, 0.0), axis=0)


def select(
    tokens: Tensor,
    num_select: int,
    tiling: Tiling,
    *,
    distance_weight: float = 0.0,
    parts: int = 1,
) -> Tensor:
    """Choose in every region of every picture: `[parts·B, N, d]` -> `int64 [B·R, k]`, indices inside each region.

    Samples of a picture stand `B` apart.
    """
    least = LEAST_COSINE - tiling.largest_penalty(distance_weight)
    if tiling.size > LARGEST_IN_REGISTERS:
        distances = measure(tokens, tiling, distance_weight=distance_weight, parts=parts)
        return select_by_distances(distances, num_select, least=least)
    tokens = dense_channels(tokens)
    pictures, channels = tokens.shape[0] // parts, tokens.shape[2]
    size, count = tiling.size, tiling.num_regions
    picks = torch.empty(pictures * count, num_select, dtype=torch.int64, device=tokens.device)
    block = power_of_two(size)
    launch(
        _select_in_registers,
        (pictures * count,),
        tokens,
        picks,
        tokens.stride(0),
        tokens.stride(1),
        pictures * tokens.stride(0),
        DISTANCE_WEIGHT=distance_weight,
        IS_VIDEO=tiling.num_frames > 1,
        LEAST=least,
        PARTS=parts,
        SIZE=size,
        NUM_SELECT=num_select,
        CHANNELS=channels,
        REGIONS=count,
        LAYOUT_WIDTH=tiling.layout_width,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        FRAME_ROWS=tiling.frame_rows,
        DEPTH=tiling.depth,
        GRID_WIDTH=tiling.grid_width,
        GRID_HEIGHT=tiling.grid_height,
        BLOCK=block,
        BLOCK_C=channels_at_once(tokens),
        num_warps=8 if block > 64 else 4,
    )
    return picks


def measure(
    tokens: Tensor,
    tiling: Tiling,
    *,
    distance_weight: float = 0.0,
    parts: int = 1,
) -> Tensor:
    """1 − S of every region of every picture: `[parts·B, N, d]` -> `float32 [B·R, n, n]`."""
    tokens = dense_channels(tokens)
    pictures, channels = tokens.shape[0] // parts, tokens.shape[2]
    size, count = tiling.size, tiling.num_regions
    distances = torch.empty(pictures * count, size, size, dtype=torch.float32, device=tokens.device)
    block = channels_at_once(tokens)
    squares = triton.cdiv(size, block)
    launch(
        _measure,
        (pictures * count, squares, squares),
        tokens,
        distances,
        tokens.stride(0),
        tokens.stride(1),
        pictures * tokens.stride(0),
        DISTANCE_WEIGHT=distance_weight,
        IS_VIDEO=tiling.num_frames > 1,
        PARTS=parts,
        SIZE=size,
        CHANNELS=channels,
        REGIONS=count,
        LAYOUT_WIDTH=tiling.layout_width,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        FRAME_ROWS=tiling.frame_rows,
        DEPTH=tiling.depth,
        GRID_WIDTH=tiling.grid_width,
        GRID_HEIGHT=tiling.grid_height,
        BLOCK=block,
        BLOCK_C=64,
        num_warps=4,
    )
    return distances


def select_by_distances(distances: Tensor, num_select: int, *, least: float = LEAST_COSINE) -> Tensor:
    """Choose by 1 − S `[G, m, n]` of m tokens to n candidates: -> `int64 [G, k]`.

    The tokens are the candidates themselves, in one picture or in several: m is a multiple of n, and every n rows are a
    symmetric square. No similarity is below `least`.
    """
    distances = distances.contiguous()
    groups, tokens, candidates = distances.shape
    picks = torch.empty(groups, num_select, dtype=torch.int64, device=distances.device)
    block_i, block_j = power_of_two(candidates), power_of_two(tokens)
    changes = torch.empty(groups, 3, block_j, dtype=torch.float32, device=distances.device)
    launch(
        _select_from_memory,
        (groups,),
        distances,
        changes,
        picks,
        MOST=1.0 - least,
        CANDIDATES=candidates,
        TOKENS=tokens,
        NUM_SELECT=num_select,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
        ROWS=max(1, min(_CHANGED_AT_ONCE, 16384 // block_i)),
        num_warps=4 if max(block_i, block_j) <= 512 else 8,
    )
    return picks
