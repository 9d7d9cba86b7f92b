"""Merge weights of local regions, one program a region: similarity, softmax over destinations and row sums in one pass.

A = softmax over destinations of scale · cos(X_T, X), M = A / row sums. With hard assignment, instead of both, the index
of the nearest destination of every token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toma_diffusion.ops.tiles import Tiling
from toma_diffusion.ops.triton_tiles import dense_channels, launch, power_of_two, token_rows


@triton.jit
def _weigh(
    tokens,
    destinations,
    weights,
    means,
    nearest,
    batch_stride,
    row_stride,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_DESTINATIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
    REGIONS: tl.constexpr,
    LAYOUT_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HARD: tl.constexpr,
):
    program = tl.program_id(0)
    region = program % REGIONS
    base = tokens + (program // REGIONS).to(tl.int64) * batch_stride
    slot = tl.arange(0, BLOCK_K)
    local = tl.arange(0, BLOCK_N)
    is_slot = slot < NUM_DESTINATIONS
    is_token = local < SIZE
    destination = tl.load(destinations + program.to(tl.int64) * NUM_DESTINATIONS + slot, mask=is_slot, other=0)
    destination = destination.to(tl.int32)
    to = base + token_rows(region, destination, LAYOUT_WIDTH, HEIGHT, WIDTH)[:, None] * row_stride
    row = token_rows(region, local, LAYOUT_WIDTH, HEIGHT, WIDTH)
    source = base + row[:, None] * row_stride

    products = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    to_square = tl.zeros((BLOCK_K,), tl.float32)
    source_square = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, CHANNELS, BLOCK_C):
        channel = start + tl.arange(0, BLOCK_C)
        is_channel = channel[None, :] < CHANNELS
        x = tl.load(to + channel[None, :], mask=is_slot[:, None] & is_channel, other=0.0)
        y = tl.load(source + channel[None, :], mask=is_token[:, None] & is_channel, other=0.0)
        products = tl.dot(x, tl.trans(y), products, input_precision="ieee")
        to_square += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        source_square += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    to_norm = tl.maximum(tl.sqrt(to_square), 1e-12)
    source_norm = tl.maximum(tl.sqrt(source_square), 1e-12)
    cosine = products / (to_norm[:, None] * source_norm[None, :])

    if HARD:
        cosine = tl.where(is_slot[:, None], cosine, -2.0)
        chosen = tl.argmax(cosine, axis=0)
        itself = tl.where((destination[:, None] == local[None, :]) & is_slot[:, None], slot[:, None], -1)
        own = tl.max(itself, axis=0)  # a destination goes to itself, also where an equal one comes before it
        chosen = tl.where(own >= 0, own, chosen)
        chosen = tl.minimum(chosen, NUM_DESTINATIONS - 1)  # also where tokens are NaN
        length: tl.constexpr = REGIONS * SIZE
        target = nearest + (program // REGIONS).to(tl.int64) * length + row
        tl.store(target, (region * NUM_DESTINATIONS + chosen).to(tl.int64), mask=is_token)
    else:
        logits = tl.where(is_slot[:, None], SCALE * cosine, -float("inf"))
        exponent = tl.exp(logits - tl.max(logits, axis=0)[None, :])
        share = exponent / tl.sum(exponent, axis=0)[None, :]
        share = tl.where(is_token[None, :], share, 0.0).to(weights.dtype.element_ty)
        mask = is_slot[:, None] & is_token[None, :]
        offset = (program.to(tl.int64) * NUM_DESTINATIONS + slot[:, None]) * SIZE + local[None, :]
        tl.store(weights + offset, share, mask=mask)
        share = share.to(tl.float32)
        mean = share / tl.maximum(tl.sum(share, axis=1), 1e-37)[:, None]
        tl.store(means + offset, mean.to(means.dtype.element_ty), mask=mask)


def weigh(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    *,
    scale: float = 0.0,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    nearest: Tensor | None = None,
) -> None:
    """Write A and M into `weights` and `means` [B·R, k, n], or the nearest destinations into `nearest` [B, N].

    `tokens` are [B, N, d], `destinations` [B·R, k] inside their regions, `tiling` is `Regions.tiling`.
    """
    tokens = dense_channels(tokens)
    _, length, channels = tokens.shape
    size, num_destinations = tiling[1] * tiling[2], destinations.shape[1]
    hard = nearest is not None
    block = power_of_two(size)
    launch(
        _weigh,
        (destinations.shape[0],),
        tokens,
        destinations,
        nearest if weights is None else weights,
        nearest if means is None else means,
        nearest if hard else weights,
        tokens.stride(0),
        tokens.stride(1),
        SCALE=scale,
        SIZE=size,
        NUM_DESTINATIONS=num_destinations,
        CHANNELS=channels,
        REGIONS=length // size,
        LAYOUT_WIDTH=tiling[0],
        HEIGHT=tiling[1],
        WIDTH=tiling[2],
        BLOCK_K=power_of_two(num_destinations),
        BLOCK_N=block,
        BLOCK_C=64 if tokens.element_size() < 4 else 32,
        HARD=hard,
        num_warps=8 if block > 64 else 4,
    )
