"""The operators on all regions of a grid at once, in plain torch or by kernels.

Every operator takes `backend`, `torch` or `triton`, and the `tiling` of the grid. Kernels read tiles in place; plain
torch reorders the tokens. `backend_of` says which of them runs an operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from toma_diffusion import ops
from toma_diffusion.ops.backend import backend_of
from toma_diffusion.ops.precision import without_autocast
from toma_diffusion.ops.tiles import Tiling

LARGEST_UNROLLED = 8
"""Up to this size of a region, compiled code writes the sums out, so that the compiler can fuse them with norms, gates
and residuals, which it cannot do with a matrix product."""


class Nearness(NamedTuple):
    """When tokens are similar: S = the mean over the parts of their cosine, minus a penalty for their distance."""

    distance_weight: float = 0.0
    """Of the squared distance, see `Tiling.penalty`."""
    parts: int = 1
    """The samples of a batch are so many parts of the same pictures, one after another. Samples of one picture share
    destinations and weights."""


COSINE = Nearness()
"""By the cosine alone, and every sample for itself."""


@without_autocast
def select(
    tokens: Tensor,
    num_select: int,
    tiling: Tiling,
    nearness: Nearness = COSINE,
    *,
    joint: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Choose destinations in every region: [parts·B, N, d] -> int64 [B, R, k], indices inside each region.

    Args:
        joint: choose once for all pictures, by the sum of their gains: [1, R, k].
    """
    weight, parts = nearness
    pictures, size, count = tokens.shape[0] // parts, tiling.size, tiling.num_regions
    alone = not joint or pictures == 1
    least = ops.LEAST_COSINE - tiling.largest_penalty(weight)
    if backend_of("selection", backend, tiling).name == "triton":
        from toma_diffusion.ops import triton_facility_location as kernels

        if alone:
            picks = kernels.select(tokens.detach(), num_select, tiling, distance_weight=weight, parts=parts)
        else:
            distances = kernels.measure(tokens.detach(), tiling, distance_weight=weight, parts=parts)
            distances = distances.reshape(pictures, count, size, size).transpose(0, 1).flatten(1, 2)
            picks = kernels.select_by_distances(distances, num_select, least=least)
        return picks.reshape(-1, count, num_select)
    penalty = None
    if weight:
        local = torch.arange(size, device=tokens.device)
        penalty = tiling.penalty(local.expand(count, -1), local, weight).repeat(pictures, 1, 1)
    similarity = ops.cosine_similarity(tiling.split(tokens), parts, penalty)  # [B·R, n, n]
    if not alone:  # candidates of a region × that region's tokens in all pictures, side by side
        similarity = similarity.reshape(pictures, count, size, size).permute(1, 2, 0, 3).flatten(2)
    return ops.facility_location(similarity, num_select, least).reshape(-1, count, num_select)


@without_autocast
def weigh(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    nearness: Nearness = COSINE,
    *,
    scale: float,
    weights: Tensor,
    means: Tensor,
    backend: str = "torch",
) -> None:
    """Write A and M of every region into `weights` and `means` [B·R, k, n], from [B, N, d] and [B·R / parts, k]."""
    weight, parts = nearness
    if backend_of("weights", backend, tiling).name == "triton":
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(
            tokens.detach(),
            destinations,
            tiling,
            distance_weight=weight,
            parts=parts,
            scale=scale,
            weights=weights,
            means=means,
        )
        return
    regions = tiling.split(tokens)
    for start, sources, penalty in _in_pieces(regions, destinations, tiling, weight):
        piece = ops.merge_weights(regions, destinations, scale, sources, penalty, parts)
        weights[:, :, start : start + sources.shape[1]] = piece.repeat(parts, 1, 1)
    ops.mean_weights(weights, out=means)


@without_autocast
def assign_nearest(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    nearness: Nearness = COSINE,
    *,
    nearest: Tensor,
    backend: str = "torch",
) -> None:
    """Write into `nearest` [B, N] which merged token, 0 ≤ … < D, each of [B, N, d] goes to, given [B·R / parts, k]."""
    weight, parts = nearness
    if backend_of("weights", backend, tiling).name == "triton":
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(
            tokens.detach(), destinations, tiling, distance_weight=weight, parts=parts, nearest=nearest
        )
        return
    regions = tiling.split(tokens)
    pieces = [
        ops.nearest_destinations(regions, destinations, sources, penalty, parts)
        for _, sources, penalty in _in_pieces(regions, destinations, tiling, weight)
    ]
    slots = ops.assign_to_themselves(torch.cat(pieces, dim=1), destinations)  # [B·R / parts, n]
    region = torch.arange(slots.shape[0], device=slots.device)[:, None] % tiling.num_regions
    merged = (slots + region * destinations.shape[1])[:, :, None]
    nearest.copy_(tiling.join(merged)[:, :, 0].repeat(parts, 1))


def _in_pieces(
    regions: Tensor, destinations: Tensor, tiling: Tiling, distance_weight: float
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The tokens of all regions, as many at once as memory allows: where they start, the tokens, their penalties."""
    piece = ops.tokens_at_once(regions.shape[0], destinations.shape[1])
    for start in range(0, tiling.size, piece):
        sources = regions[:, start : start + piece]
        penalty = None
        if distance_weight:
            local = torch.arange(start, start + sources.shape[1], device=regions.device)
            penalty = tiling.penalty(destinations, local, distance_weight)
        yield start, sources, penalty


@without_autocast
def merge(tokens: Tensor, means: Tensor, tiling: Tiling, *, backend: str = "torch") -> Tensor:
    """M X by a block per region: [B, N, C], [B·R, k, n] -> [B, D, C]."""
    if _is_unrolled(tiling):
        regions = tiling.split(tokens)
        merged = _sum([means[:, :, index, None] * regions[:, index, None, :] for index in range(tiling.size)])
    elif _has_kernel("merging", backend, tiling, means, tokens):
        from toma_diffusion.ops import triton_merge

        return triton_merge.merge(tokens, means, tiling)
    else:
        merged = means.to(tokens.dtype) @ tiling.split(tokens)  # [B·R, k, C]
    return merged.reshape(tokens.shape[0], -1, tokens.shape[2])


@without_autocast
def unmerge(
    merged: Tensor, weights: Tensor, tiling: Tiling, residual: Tensor | None = None, *, backend: str = "torch"
) -> Tensor:
    """Aᵀ Y by a block per region, added to a residual if there is one: [B, D, C] -> [B, N, C]."""
    blocks, num_destinations, _ = weights.shape
    unrolled = _is_unrolled(tiling)
    if not unrolled and _has_kernel("unmerging", backend, tiling, weights, merged, residual):
        from toma_diffusion.ops import triton_merge

        return triton_merge.unmerge(merged, weights, tiling, residual)
    regions = merged.reshape(blocks, num_destinations, -1)  # [B·R, k, C]
    if unrolled:
        spread = _sum([weights[:, slot, :, None] * regions[:, slot, None, :] for slot in range(num_destinations)])
    else:
        spread = ops.unmerge(regions, weights)
    tokens = tiling.join(spread)
    return tokens if residual is None else residual + tokens


@without_autocast
def merge_members(
    tokens: Tensor, members: Tensor, offsets: Tensor, num_destinations: int, tiling: Tiling, *, backend: str = "torch"
) -> Tensor:
    """The mean of every destination's members: [B, N, C] -> [B, D, C].

    `members` are the B·N tokens of all samples sorted by destination; those of the d-th of all B·D destinations stand
    from `offsets[d]` to `offsets[d + 1]`.
    """
    chosen = backend_of("merging", backend, tiling, hard=True, gradients=needs_gradient(tokens))
    if chosen.name == "triton":
        from toma_diffusion.ops import triton_merge

        return triton_merge.merge_members(tokens, members, offsets, num_destinations)
    means = functional.embedding_bag(members, tokens.reshape(-1, tokens.shape[2]), offsets[:-1], mode="mean")
    return means.reshape(tokens.shape[0], num_destinations, -1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd must follow any of them. The kernels have no backward pass."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _has_kernel(operator: str, backend: str, tiling: Tiling, weights: Tensor, *tensors: Tensor | None) -> bool:
    gradients = needs_gradient(*tensors)
    return backend_of(operator, backend, tiling, num_weights=weights.numel(), gradients=gradients).name == "triton"


def _is_unrolled(tiling: Tiling) -> bool:
    return tiling.size <= LARGEST_UNROLLED and torch.compiler.is_compiling()


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
