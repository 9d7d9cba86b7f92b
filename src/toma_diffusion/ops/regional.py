"""The operators on all regions of a grid at once: the only place that chooses between plain torch and the kernels.

Every operator takes `backend`, `torch` or `triton`, and the `tiling` of the grid.
Kernels read tiles in place; plain torch reorders the tokens. Where a kernel cannot run, plain torch is used, and
`backends` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from toma_diffusion import ops
from toma_diffusion.ops.backend import LARGEST_SELECTED, LARGEST_WEIGHED
from toma_diffusion.ops.tiles import Tiling

LARGEST_UNROLLED = 8
"""Up to this size of a region, compiled code writes the sums out, so that the compiler can fuse them with norms, gates
and residuals, which it cannot do with a matrix product."""


MOST_WEIGHTS = 2**31
"""Above this, plain torch merges: a few large regions of a long video."""


class Backend(NamedTuple):
    """What runs one operator."""

    name: str
    """`torch` or `triton`."""
    reason: str = ""
    """Why it is not the kernel, if a kernel was requested."""


def backends(backend: str, select_size: int, assign_size: int, assign_count: int) -> dict[str, Backend]:
    """What runs each operator of a plan.

    Args:
        backend: that of the plan.
        select_size: tokens of a region in which destinations are chosen.
        assign_size: tokens of a region in which tokens are assigned, of which there are `assign_count`.
    """
    names = ("selection", "weights", "merging")
    if backend == "torch":
        return dict.fromkeys(names, Backend("torch"))
    found = dict.fromkeys(names, Backend("triton"))
    if select_size > LARGEST_SELECTED:
        found["selection"] = Backend(
            "torch", f"regions of {select_size} tokens; the kernels take up to {LARGEST_SELECTED}"
        )
    if assign_count == 1:
        found["weights"] = Backend("torch", "one product over the whole grid, which torch's library does fastest")
    elif assign_size > LARGEST_WEIGHED:
        found["weights"] = Backend(
            "torch", f"regions of {assign_size} tokens; the kernel takes up to {LARGEST_WEIGHED}"
        )
    return found


class Nearness(NamedTuple):
    """When tokens are similar: S = the mean over the parts of their cosine, minus a penalty for their distance."""

    distance_weight: float = 0.0
    """Of the squared distance in the image, see `Tiling.penalty`."""
    parts: int = 1
    """The samples of a batch are so many parts of the same pictures, one after another. Samples of one picture share
    destinations and weights."""
    frame_weight: float = 0.0
    """Of the squared distance in time, in a video."""

    @property
    def looks_at_distances(self) -> bool:
        """Whether there is any penalty."""
        return self.distance_weight > 0 or self.frame_weight > 0


def select(
    tokens: Tensor,
    num_select: int,
    tiling: Tiling,
    nearness: Nearness = Nearness(),  # noqa: B008 (immutable)
    *,
    joint: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Choose destinations in every region: [parts·B, N, d] -> int64 [B, R, k], indices inside each region.

    Args:
        joint: choose once for all pictures, by the sum of their gains: [1, R, k].
    """
    weight, parts, frame_weight = nearness
    pictures, size, count = tokens.shape[0] // parts, tiling.size, tiling.num_regions
    alone = not joint or pictures == 1
    least = ops.LEAST_COSINE - tiling.largest_penalty(weight, frame_weight)
    if backend == "triton" and size <= LARGEST_SELECTED:
        from toma_diffusion.ops import triton_facility_location as kernels

        if alone:
            picks = kernels.select(
                tokens.detach(), num_select, tiling, distance_weight=weight, frame_weight=frame_weight, parts=parts
            )
            return picks.reshape(-1, count, num_select)
        distances = kernels.measure(
            tokens.detach(), tiling, distance_weight=weight, frame_weight=frame_weight, parts=parts
        )
        distances = distances.reshape(pictures, count, size, size).transpose(0, 1).flatten(1, 2)
        picks = kernels.select_by_distances(distances, num_select, least=least)
        return picks.reshape(-1, count, num_select)
    penalty = None
    if nearness.looks_at_distances:
        local = torch.arange(size, device=tokens.device)
        penalty = tiling.penalty(local.expand(count, -1), local, weight, frame_weight).repeat(pictures, 1, 1)
    similarity = ops.cosine_similarity(tiling.split(tokens), parts, penalty)  # [B·R, n, n]
    if not alone:  # candidates of a region × that region's tokens in all pictures, side by side
        similarity = similarity.reshape(pictures, count, size, size).permute(1, 2, 0, 3).flatten(2)
    return ops.facility_location(similarity, num_select, least).reshape(-1, count, num_select)


def weigh(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    nearness: Nearness = Nearness(),  # noqa: B008
    *,
    scale: float,
    weights: Tensor,
    means: Tensor,
    backend: str = "torch",
) -> None:
    """Write A and M of every region into `weights` and `means` [B·R, k, n], from [B, N, d] and [B·R / parts, k]."""
    weight, parts, frame_weight = nearness
    if _has_weights_kernel(tiling, backend):
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(
            tokens.detach(),
            destinations,
            tiling,
            distance_weight=weight,
            frame_weight=frame_weight,
            parts=parts,
            scale=scale,
            weights=weights,
            means=means,
        )
        return
    regions = tiling.split(tokens)
    for start, sources, penalty in _in_pieces(regions, destinations, tiling, nearness):
        piece = ops.merge_weights(regions, destinations, scale, sources, penalty, parts)
        weights[:, :, start : start + sources.shape[1]] = piece.repeat(parts, 1, 1)
    ops.mean_weights(weights, out=means)


def assign_nearest(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    nearness: Nearness = Nearness(),  # noqa: B008
    *,
    nearest: Tensor,
    backend: str = "torch",
) -> None:
    """Write into `nearest` [B, N] which merged token, 0 ≤ … < D, each of [B, N, d] goes to, given [B·R / parts, k]."""
    weight, parts, frame_weight = nearness
    if _has_weights_kernel(tiling, backend):
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(
            tokens.detach(),
            destinations,
            tiling,
            distance_weight=weight,
            frame_weight=frame_weight,
            parts=parts,
            nearest=nearest,
        )
        return
    regions = tiling.split(tokens)
    pieces = [
        ops.nearest_destinations(regions, destinations, sources, penalty, parts)
        for _, sources, penalty in _in_pieces(regions, destinations, tiling, nearness)
    ]
    slots = ops.assign_to_themselves(torch.cat(pieces, dim=1), destinations)  # [B·R / parts, n]
    region = torch.arange(slots.shape[0], device=slots.device)[:, None] % tiling.num_regions
    merged = (slots + region * destinations.shape[1])[:, :, None]
    nearest.copy_(tiling.join(merged)[:, :, 0].repeat(parts, 1))


def _has_weights_kernel(tiling: Tiling, backend: str) -> bool:
    return backend == "triton" and tiling.size <= LARGEST_WEIGHED and tiling.num_regions > 1


def _in_pieces(
    regions: Tensor, destinations: Tensor, tiling: Tiling, nearness: Nearness
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The tokens of all regions, as many at once as memory allows: where they start, the tokens, their penalties."""
    piece = ops.tokens_at_once(regions.shape[0], destinations.shape[1])
    for start in range(0, tiling.size, piece):
        sources = regions[:, start : start + piece]
        penalty = None
        if nearness.looks_at_distances:
            local = torch.arange(start, start + sources.shape[1], device=regions.device)
            penalty = tiling.penalty(destinations, local, nearness.distance_weight, nearness.frame_weight)
        yield start, sources, penalty


def merge(tokens: Tensor, means: Tensor, tiling: Tiling, *, backend: str = "torch") -> Tensor:
    """M X by a block per region: [B, N, C], [B·R, k, n] -> [B, D, C]."""
    if tiling.size <= LARGEST_UNROLLED and torch.compiler.is_compiling():
        regions = tiling.split(tokens)
        merged = _sum([means[:, :, index, None] * regions[:, index, None, :] for index in range(tiling.size)])
    elif _has_merge_kernel(means, tiling, backend) and tokens.shape[2] > 1 and not needs_gradient(tokens):
        # Not for single numbers a token, such as their lengths: the kernel takes 128 channels at once.
        from toma_diffusion.ops import triton_merge

        return triton_merge.merge(tokens, means, tiling)
    else:
        merged = means.to(tokens.dtype) @ tiling.split(tokens)  # [B·R, k, C]
    return merged.reshape(tokens.shape[0], -1, tokens.shape[2])


def _has_merge_kernel(weights: Tensor, tiling: Tiling, backend: str) -> bool:
    """The kernels count weights in 32 bits."""
    return backend == "triton" and tiling.num_regions > 1 and weights.numel() < MOST_WEIGHTS


def unmerge(
    merged: Tensor,
    weights: Tensor,
    tiling: Tiling,
    residual: Tensor | None = None,
    *,
    method: str = "transpose",
    backend: str = "torch",
) -> Tensor:
    """Aᵀ Y, or M⁺ Y, by a block per region, added to a residual if there is one: [B, D, C] -> [B, N, C]."""
    blocks, num_destinations, _ = weights.shape
    unrolls = tiling.size <= LARGEST_UNROLLED and torch.compiler.is_compiling()
    has_kernel = method == "transpose" and _has_merge_kernel(weights, tiling, backend)
    if has_kernel and not unrolls and not needs_gradient(merged, residual):
        from toma_diffusion.ops import triton_merge

        return triton_merge.unmerge(merged, weights, tiling, residual)
    regions = merged.reshape(blocks, num_destinations, -1)  # [B·R, k, C]
    if method == "transpose" and unrolls:
        spread = _sum([weights[:, slot, :, None] * regions[:, slot, None, :] for slot in range(num_destinations)])
    else:
        spread = ops.unmerge(regions, weights, method)
    tokens = tiling.join(spread)
    return tokens if residual is None else residual + tokens


def merge_members(
    tokens: Tensor, members: Tensor, offsets: Tensor, num_destinations: int, *, backend: str = "torch"
) -> Tensor:
    """The mean of every destination's members: [B, N, C] -> [B, D, C].

    `members` are the B·N tokens of all samples sorted by destination; those of the d-th of all B·D destinations stand
    from `offsets[d]` to `offsets[d + 1]`.
    """
    if backend == "triton" and not needs_gradient(tokens):
        from toma_diffusion.ops import triton_merge

        return triton_merge.merge_members(tokens, members, offsets, num_destinations)
    means = functional.embedding_bag(members, tokens.reshape(-1, tokens.shape[2]), offsets[:-1], mode="mean")
    return means.reshape(tokens.shape[0], num_destinations, -1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd must follow any of them. The kernels have no backward pass."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
