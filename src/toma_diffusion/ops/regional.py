"""The operators on all regions of a grid at once: the only place that chooses between plain torch and the kernels.

Every operator takes `backend`, `torch` or `triton`, and the `tiling` of the grid.
Kernels read tiles in place; plain torch reorders the tokens. Where a kernel cannot run, plain torch is used, and
`backends` gives the reason.
"""

from __future__ import annotations

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
        reason = f"regions of {select_size} tokens; its kernel takes up to {LARGEST_SELECTED}"
        found["selection"] = Backend("torch", f"the similarity of {reason}")
    if assign_count == 1:
        found["weights"] = Backend("torch", "one product over the whole grid, which torch's library does fastest")
    elif assign_size > LARGEST_WEIGHED:
        found["weights"] = Backend(
            "torch", f"regions of {assign_size} tokens; the kernel takes up to {LARGEST_WEIGHED}"
        )
    return found


def select(
    tokens: Tensor,
    num_select: int,
    tiling: Tiling,
    *,
    joint: bool = False,
    gain_scale: Tensor | None = None,
    backend: str = "torch",
) -> Tensor:
    """Choose destinations in every region: [B, N, d] -> int64 [B, R, k], indices inside each region.

    Args:
        joint: choose once for all samples, by the sum of their gains: [1, R, k].
        gain_scale: `[B·R, n]`, or `[R, n]` if joint: what gains are multiplied by.
    """
    batch, size, count = tokens.shape[0], tiling.size, tiling.num_regions
    alone = not joint or batch == 1
    choose = ops.facility_location
    if backend == "triton":
        from toma_diffusion.ops import triton_facility_location as kernels

        if alone and size <= LARGEST_SELECTED:
            picks = kernels.select(tokens.detach(), num_select, tiling, gain_scale)
            return picks.reshape(-1, count, num_select)
        choose = kernels.select_from_similarity
    similarity = ops.cosine_similarity(tiling.split(tokens))  # [B·R, n, n]
    if not alone:  # candidates of a region × that region's tokens in all samples, side by side
        similarity = similarity.reshape(batch, count, size, size).permute(1, 2, 0, 3).flatten(2)
    return choose(similarity, num_select, gain_scale).reshape(-1, count, num_select)


def weigh(
    tokens: Tensor,
    destinations: Tensor,
    tiling: Tiling,
    *,
    scale: float,
    weights: Tensor,
    means: Tensor,
    backend: str = "torch",
) -> None:
    """Write A and M of every region into `weights` and `means` [B·R, k, n], from [B, N, d] and [B·R, k]."""
    if backend == "triton" and tiling.size <= LARGEST_WEIGHED and tiling.num_regions > 1:
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(tokens.detach(), destinations, tiling, scale=scale, weights=weights, means=means)
        return
    regions = tiling.split(tokens)
    part = ops.tokens_at_once(*destinations.shape)
    for start in range(0, tiling.size, part):  # of a global matrix a part at a time, to save memory
        sources = regions[:, start : start + part]
        weights[:, :, start : start + part] = ops.merge_weights(regions, destinations, scale, sources)
    ops.mean_weights(weights, out=means)


def assign_nearest(
    tokens: Tensor, destinations: Tensor, tiling: Tiling, *, nearest: Tensor, backend: str = "torch"
) -> None:
    """Write into `nearest` [B, N] which merged token, 0 ≤ … < D, each of [B, N, d] goes to, given [B·R, k]."""
    if backend == "triton" and tiling.size <= LARGEST_WEIGHED and tiling.num_regions > 1:
        from toma_diffusion.ops import triton_weights

        triton_weights.weigh(tokens.detach(), destinations, tiling, nearest=nearest)
        return
    slots = ops.nearest_destinations(tiling.split(tokens), destinations)  # [B·R, n]
    region = torch.arange(slots.shape[0], device=slots.device)[:, None] % tiling.num_regions
    merged = (slots + region * destinations.shape[1])[:, :, None]
    nearest.copy_(tiling.join(merged)[:, :, 0])


def merge(tokens: Tensor, means: Tensor, tiling: Tiling, *, backend: str = "torch") -> Tensor:
    """M X by a block per region: [B, N, C], [B·R, k, n] -> [B, D, C]."""
    if tiling.size <= LARGEST_UNROLLED and torch.compiler.is_compiling():
        regions = tiling.split(tokens)
        merged = _sum([means[:, :, index, None] * regions[:, index, None, :] for index in range(tiling.size)])
    elif backend == "triton" and tiling.num_regions > 1 and not needs_gradient(tokens):
        from toma_diffusion.ops import triton_merge

        return triton_merge.merge(tokens, means, tiling)
    else:
        merged = means.to(tokens.dtype) @ tiling.split(tokens)  # [B·R, k, C]
    return merged.reshape(tokens.shape[0], -1, tokens.shape[2])


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
    has_kernel = backend == "triton" and method == "transpose" and tiling.num_regions > 1
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
