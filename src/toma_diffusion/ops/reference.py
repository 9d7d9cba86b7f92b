"""The paper in plain torch: the reference that faster implementations are tested against.

Symbols as in the paper: X tokens, T destinations, S cosine similarity, c coverage, A merge weights, M = A / row sums.
A leading dimension B is a batch of independent items: samples, or samples × regions.

Similarities, softmax and row sums are computed in float32 (float64 for float64 tokens), matrix products with tokens in
the tokens' own dtype: pass float32 for the truth, half precision to see what plain torch makes of it. Autocast is off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toma_diffusion.ops.precision import without_autocast

LEAST_COSINE = -1.0
LEAST_NORM = 1e-12
TIE = 1e-5
"""Gains that differ by no more are equal. Two tokens that cover only each other have the same gain, whichever is
picked; rounding must not decide between them, or other hardware would choose others."""


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """cos(X_i, Y_j) in float32 or better, a zero token at 0 to all: [B, k, d], [B, n, d] -> [B, k, n]."""
    norms = _norm(left)[:, :, None] * _norm(right)[:, None, :]
    return _products(left, right.mT) / norms


def mean_cosine(left: Tensor, right: Tensor, parts: int) -> Tensor:
    """The mean cosine of the parts that a batch consists of: [parts·B, k, d], [parts·B, n, d] -> [B, k, n]."""
    cosines = cosine(left, right)
    return cosines if parts == 1 else cosines.reshape(parts, -1, *cosines.shape[1:]).mean(dim=0)


@without_autocast
def cosine_similarity(tokens: Tensor, parts: int = 1, penalty: Tensor | None = None) -> Tensor:
    """S_ij = cos(X_i, X_j): [B, n, d] -> [B, n, n]; the mean of the parts that a batch consists of, minus a penalty."""
    similarity = mean_cosine(tokens, tokens, parts)
    return similarity if penalty is None else similarity - penalty


@without_autocast
def facility_location(similarity: Tensor, num_select: int, least: float = LEAST_COSINE) -> Tensor:
    """Greedy maximisation of f(T) = Σ_j max_{i∈T} S_ij, within 1 − 1/e of the best set of that size.

    A good destination is one that many tokens resemble and that no earlier destination already stands for. Each pick
    takes the candidate of the largest gain Σ_j max(0, S_ij − c_j), where c_j is how well j is covered so far. Coverage
    starts at the least similarity, so that the first pick is the largest row sum. A candidate is picked once; a tie
    goes to the lowest index.

    Args:
        similarity: `[B, n, m]`, of n candidates to m tokens. To choose among a region's own tokens n = m;
            to choose jointly for several samples, their tokens stand side by side in m, and the gains add up.
        num_select: how many to pick, 1 ≤ k ≤ n.
        least: no similarity is below it. For cosines −1.

    Returns:
        `int64 [B, k]`, in the order of picking: the first j columns are the answer for k = j.
    """
    batch, candidates, tokens = similarity.shape
    coverage = similarity.new_full((batch, 1, tokens), least)  # c
    chosen = torch.zeros(batch, candidates, dtype=torch.bool, device=similarity.device)
    picks = torch.empty(batch, num_select, dtype=torch.int64, device=similarity.device)
    for step in range(num_select):
        gain = (similarity - coverage).clamp_min(0).sum(dim=-1)  # [B, n]
        gain = gain.nan_to_num(0.0).masked_fill(chosen, -torch.inf)  # a NaN is no larger than anything
        largest = gain.amax(dim=-1, keepdim=True)
        pick = (gain >= largest - TIE).to(torch.uint8).argmax(dim=-1, keepdim=True)  # [B, 1], first of the largest
        coverage = torch.maximum(coverage, similarity.gather(1, pick[:, :, None].expand(-1, -1, tokens)))
        chosen.scatter_(1, pick, True)
        picks[:, step] = pick[:, 0]
    return picks


@without_autocast
def facility_location_value(similarity: Tensor, destinations: Tensor) -> Tensor:
    """f of every prefix of `destinations`: [B, n, m], [B, k] -> [B, k]. The gains are its differences."""
    rows = similarity.gather(1, destinations[:, :, None].expand(-1, -1, similarity.shape[2]))  # [B, k, m]
    return rows.cummax(dim=1).values.sum(dim=-1)


@without_autocast
def merge_weights(
    tokens: Tensor,
    destinations: Tensor,
    scale: float,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """A = softmax(scale · S(X_T, X)) over the destinations: each token's column sums to 1. S is the cosine.

    Args:
        tokens: X, `[B, n, d]`.
        destinations: T, `int64 [B, k]`, indices into n.
        scale: 1/τ. The larger, the closer A is to 0/1.
        sources: `[B, m, d]`, the tokens whose columns are wanted; all if not given.
        penalty: `[B, k, m]`, or one that broadcasts to it: what is subtracted from the cosines, if anything.
        parts: the batch of `tokens` and `sources` is so many times larger. S is the mean of these parts.

    Returns:
        A, `[B, k, n]`, or `[B, k, m]` of the sources, in the tokens' dtype.
    """
    similarity = mean_cosine(tokens if sources is None else sources, _chosen(tokens, destinations, parts), parts)
    if penalty is not None:
        similarity = similarity - penalty.mT
    # Over the last dimension, then transposed: over the first, torch's softmax is many times slower on a GPU.
    return (scale * similarity).softmax(dim=-1).to(tokens.dtype).mT.contiguous()


@without_autocast
def nearest_destinations(
    tokens: Tensor,
    destinations: Tensor,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """The limit of `merge_weights` for a scale without bound: [B, n, d], [B, k] -> int64 [B, n], each 0 ≤ … < k.

    Every token goes to its nearest destination, the first of equals; a destination to itself. Arguments as in
    `merge_weights`. Of `sources` the nearest is found without looking whether they are destinations themselves.
    """
    similarity = mean_cosine(tokens if sources is None else sources, _chosen(tokens, destinations, parts), parts)
    if penalty is not None:
        similarity = similarity - penalty.mT
    nearest = similarity.argmax(dim=-1)
    return nearest if sources is not None else assign_to_themselves(nearest, destinations)


def assign_to_themselves(nearest: Tensor, destinations: Tensor) -> Tensor:
    """Send every destination to itself, also where an equal one comes before it: [B, n], [B, k] -> [B, n]."""
    slots = torch.arange(destinations.shape[1], device=nearest.device).expand_as(destinations)
    return nearest.scatter(1, destinations, slots)


def _chosen(tokens: Tensor, destinations: Tensor, parts: int) -> Tensor:
    """X_T: [parts·B, n, d], [B, k] -> [parts·B, k, d]."""
    return tokens.gather(1, destinations.repeat(parts, 1)[:, :, None].expand(-1, -1, tokens.shape[2]))


def tokens_at_once(batch: int, num_destinations: int) -> int:
    """How many tokens to compare with all destinations at once, so that the similarities take 32 MiB."""
    return max(1, 2**23 // (batch * num_destinations))


@without_autocast
def mean_weights(weights: Tensor, out: Tensor | None = None) -> Tensor:
    """M = A / row sums, which makes means of sums. A row that rounding has emptied stays zero.

    Written to `out` if that is given, without a float32 copy of a matrix that may have millions of elements.
    """
    dtype = torch.promote_types(weights.dtype, torch.float32)
    sums = weights.sum(dim=-1, keepdim=True, dtype=dtype).clamp_min(torch.finfo(dtype).tiny)
    return (weights / sums).to(weights.dtype) if out is None else torch.div(weights, sums, out=out)


@without_autocast
def merge(tokens: Tensor, weights: Tensor) -> Tensor:
    """M X: every destination becomes the weighted mean of what merges into it. [B, n, C], [B, k, n] -> [B, k, C]."""
    return mean_weights(weights).to(tokens.dtype) @ tokens


@without_autocast
def unmerge(merged: Tensor, weights: Tensor) -> Tensor:
    """Aᵀ Y by the un-normalised A, every token takes the mean of its destinations: [B, k, C] -> [B, n, C]."""
    return weights.mT.to(merged.dtype) @ merged


@without_autocast
def unmerge_by_pseudo_inverse(merged: Tensor, weights: Tensor) -> Tensor:
    """M⁺ Y = Mᵀ (M Mᵀ)⁺ Y in float32: [B, k, C], [B, k, n] -> [B, n, C].

    The least-squares answer, also where destinations coincide and M Mᵀ is singular. Where A is 0/1 it equals `unmerge`.
    """
    matrix = mean_weights(weights.to(torch.promote_types(weights.dtype, torch.float32)))  # M
    inverse_gram: Tensor = torch.linalg.pinv(matrix @ matrix.mT, hermitian=True)
    return (matrix.mT @ (inverse_gram @ merged.to(matrix.dtype))).to(merged.dtype)


def _norm(tokens: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    return norm.clamp_min(LEAST_NORM)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """In float32 or better. Products of half-precision numbers are exact in float32, so a GPU's matrix units can
    compute them. Converting both sides first would be 30 times slower."""
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(left, right, out_dtype=torch.float32)
    dtype = torch.promote_types(left.dtype, torch.float32)
    return left.to(dtype) @ right.to(dtype)
