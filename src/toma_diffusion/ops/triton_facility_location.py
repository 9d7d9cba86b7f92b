"""Greedy facility location, one program a region: similarity and all picks in one launch, nothing goes to the host.

S_ij = x_i·x_j / (‖x_i‖ ‖x_j‖); then k times: pick the i of the largest f_i Σ_j max(0, S_ij − c_j), raise c_j to S_ij.
Half-precision products are exact in the float32 they are summed in, so tensor cores lose nothing here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toma_diffusion.ops.tiles import Tiling
from toma_diffusion.ops.triton_tiles import dense_channels, launch, power_of_two, token_rows


@triton.jit
def _select_in_registers(
    tokens,
    gain_scale,
    picks,
    batch_stride,
    row_stride,
    SIZE: tl.constexpr,
    NUM_SELECT: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_GAIN_SCALE: tl.constexpr,
):
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    valid = index < SIZE
    rows = token_rows(program % REGIONS, index, LAYOUT_WIDTH, HEIGHT, WIDTH)
    pointers = tokens + (program // REGIONS).to(tl.int64) * batch_stride + rows[:, None] * row_stride
    products = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        mask = valid[:, None] & (channel[None, :] < CHANNELS)
        block = tl.load(pointers + channel[None, :], mask=mask, other=0.0)
        products = tl.dot(block, tl.trans(block), products, input_precision="ieee")

    squares = tl.where(index[:, None] == index[None, :], products, 0.0)
    norm = tl.maximum(tl.sqrt(tl.sum(squares, axis=1)), 1e-12)
    norm_of_column = tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), 1e-12)
    similarity = products / (norm[:, None] * norm_of_column[None, :])
    similarity = tl.where(valid[None, :], similarity, -1.0)  # what is not a token is covered from the start

    coverage = tl.full((BLOCK,), -1.0, tl.float32)
    chosen = index >= SIZE
    if HAS_GAIN_SCALE:
        factor = tl.load(gain_scale + program.to(tl.int64) * SIZE + index, mask=valid, other=1.0)
    else:
        factor = tl.full((BLOCK,), 1.0, tl.float32)
    for step in range(NUM_SELECT):
        gain = factor * tl.sum(tl.maximum(similarity - coverage[None, :], 0.0), axis=1)
        gain = tl.where(gain == gain, gain, 0.0)  # a NaN must not lead to an index outside the region
        pick = tl.argmax(tl.where(chosen, -1.0, gain), axis=0)
        tl.store(picks + program.to(tl.int64) * NUM_SELECT + step, pick.to(tl.int64))
        row = tl.max(tl.where(index[:, None] == pick, similarity, -2.0), axis=0)
        coverage = tl.maximum(coverage, row)
        chosen = chosen | (index == pick)


@triton.jit
def _select_from_memory(
    similarity,
    gain_scale,
    picks,
    CANDIDATES: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_SELECT: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    HAS_GAIN_SCALE: tl.constexpr,
):
    """The same loop over a similarity that is too large for registers. It is overwritten: a picked row is marked."""
    program = tl.program_id(0)
    base = similarity + program.to(tl.int64) * CANDIDATES * TOKENS
    column = tl.arange(0, BLOCK_J)
    coverage = tl.full((BLOCK_J,), -1.0, tl.float32)
    for step in range(NUM_SELECT):
        best_gain = -2.0
        pick = tl.zeros((), tl.int32)
        for start in range(0, CANDIDATES, BLOCK_I):
            index = start + tl.arange(0, BLOCK_I)
            mask = (index[:, None] < CANDIDATES) & (column[None, :] < TOKENS)
            block = tl.load(base + index[:, None] * TOKENS + column[None, :], mask=mask, other=-1.0)
            gain = tl.sum(tl.maximum(block - coverage[None, :], 0.0), axis=1)
            if HAS_GAIN_SCALE:
                place = gain_scale + program.to(tl.int64) * CANDIDATES + index
                gain = gain * tl.load(place, mask=index < CANDIDATES, other=1.0)
            gain = tl.where(gain == gain, gain, 0.0)
            taken = tl.load(base + index * TOKENS, mask=index < CANDIDATES, other=-2.0) < -1.5
            gain = tl.where(taken, -1.0, gain)
            here = tl.max(gain, axis=0)
            first = tl.argmax(gain, axis=0) + start
            pick = tl.where(here > best_gain, first, pick)
            best_gain = tl.maximum(best_gain, here)
        tl.store(picks + program.to(tl.int64) * NUM_SELECT + step, pick.to(tl.int64))
        row = tl.load(base + pick * TOKENS + column, mask=column < TOKENS, other=-1.0)
        coverage = tl.maximum(coverage, row)
        tl.debug_barrier()  # all have read the row before it is marked
        tl.store(base + pick * TOKENS, -2.0)
        tl.debug_barrier()  # and the mark is there before all read on


def select(tokens: Tensor, num_select: int, tiling: Tiling, gain_scale: Tensor | None = None) -> Tensor:
    """Choose in every region of every sample: `[B, N, d]` -> `int64 [B·R, k]`, indices inside each region.

    `tiling` is `Regions.tiling`; regions have at most `LARGEST_SELECTED` tokens. `gain_scale`, `float32 [B·R, n]`, is
    what gains are multiplied by.
    """
    tokens = dense_channels(tokens)
    batch, length, channels = tokens.shape
    size = tiling[1] * tiling[2]
    count = length // size
    picks = torch.empty(batch * count, num_select, dtype=torch.int64, device=tokens.device)
    block = power_of_two(size)
    launch(
        _select_in_registers,
        (batch * count,),
        tokens,
        tokens if gain_scale is None else gain_scale,
        picks,
        tokens.stride(0),
        tokens.stride(1),
        SIZE=size,
        NUM_SELECT=num_select,
        CHANNELS=channels,
        REGIONS=count,
        LAYOUT_WIDTH=tiling[0],
        HEIGHT=tiling[1],
        WIDTH=tiling[2],
        BLOCK=block,
        BLOCK_C=64 if tokens.element_size() < 4 else 32,
        HAS_GAIN_SCALE=gain_scale is not None,
        num_warps=8 if block > 64 else 4,
    )
    return picks


def select_from_similarity(similarity: Tensor, num_select: int, gain_scale: Tensor | None = None) -> Tensor:
    """Choose by a similarity `float32 [G, n, m]`, which is overwritten: -> `int64 [G, k]`. `gain_scale` is `[G, n]`."""
    similarity = similarity.contiguous()
    groups, candidates, tokens = similarity.shape
    picks = torch.empty(groups, num_select, dtype=torch.int64, device=similarity.device)
    block_j = power_of_two(tokens)
    launch(
        _select_from_memory,
        (groups,),
        similarity,
        similarity if gain_scale is None else gain_scale,
        picks,
        CANDIDATES=candidates,
        TOKENS=tokens,
        NUM_SELECT=num_select,
        BLOCK_I=max(1, min(power_of_two(candidates), 16384 // block_j)),
        BLOCK_J=block_j,
        HAS_GAIN_SCALE=gain_scale is not None,
        num_warps=16 if block_j >= 256 else 4,
    )
    return picks
