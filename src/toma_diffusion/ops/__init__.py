"""The operators of token merging: tensors in, tensors out.

Selection and weights are `torch.library` operators with a fake implementation, so that `torch.compile` does not unroll
their loops. Similarity is one too, so that compiled and eager code round it alike: cosines often tie, and a tie that is
broken differently changes every later pick. They are registered with `Library.define`, not `custom_op`, because a call
then costs 1 µs more than a plain function, not 10 µs (CPU, torch 2.13). They have no gradient: the selection is treated
as a constant. `merge` and `unmerge` are plain torch, which a compiler can fuse.

`triton_*.py` do the same on NVIDIA GPUs, for all regions of a grid at once; `backend.py` decides when they run.
All of them ignore autocast (`precision.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from toma_diffusion.ops import reference
from toma_diffusion.ops.reference import (
    LEAST_COSINE,
    assign_to_themselves,
    facility_location_value,
    mean_weights,
    tokens_at_once,
)

__all__ = [
    "LEAST_COSINE",
    "assign_to_themselves",
    "cosine_similarity",
    "facility_location",
    "facility_location_value",
    "mean_weights",
    "merge",
    "merge_weights",
    "nearest_destinations",
    "tokens_at_once",
    "unmerge",
]

NAMESPACE = "toma_diffusion"


def _fake_cosine_similarity(tokens: Tensor, parts: int = 1, penalty: Tensor | None = None) -> Tensor:
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    return tokens.new_empty((tokens.shape[0] // parts, tokens.shape[1], tokens.shape[1]), dtype=dtype)


def _fake_facility_location(similarity: Tensor, num_select: int, least: float = LEAST_COSINE) -> Tensor:
    return similarity.new_empty((similarity.shape[0], num_select), dtype=torch.int64)


def _fake_merge_weights(
    tokens: Tensor,
    destinations: Tensor,
    scale: float,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    columns = (tokens if sources is None else sources).shape[1]
    return tokens.new_empty((tokens.shape[0] // parts, destinations.shape[1], columns))


def _fake_nearest_destinations(
    tokens: Tensor,
    destinations: Tensor,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    columns = (tokens if sources is None else sources).shape[1]
    return tokens.new_empty((tokens.shape[0] // parts, columns), dtype=torch.int64)


_library = torch.library.Library(NAMESPACE, "DEF")
for _signature, _implementation, _fake in (
    (
        "(Tensor tokens, int parts=1, Tensor? penalty=None) -> Tensor",
        reference.cosine_similarity,
        _fake_cosine_similarity,
    ),
    (
        "(Tensor similarity, int num_select, float least=-1.0) -> Tensor",
        reference.facility_location,
        _fake_facility_location,
    ),
    (
        "(Tensor tokens, Tensor destinations, float scale, Tensor? sources=None, Tensor? penalty=None, int parts=1)"
        " -> Tensor",
        reference.merge_weights,
        _fake_merge_weights,
    ),
    (
        "(Tensor tokens, Tensor destinations, Tensor? sources=None, Tensor? penalty=None, int parts=1) -> Tensor",
        reference.nearest_destinations,
        _fake_nearest_destinations,
    ),
):
    _name = _implementation.__name__
    _library.define(_name + _signature)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)

_ops = getattr(torch.ops, NAMESPACE)


def cosine_similarity(tokens: Tensor, parts: int = 1, penalty: Tensor | None = None) -> Tensor:
    """S_ij = cos(X_i, X_j), in float32 or better: `[B, n, d]` -> `[B, n, n]`.

    If the batch consists of `parts` of equal size, one after another: their mean, `[B / parts, n, n]`. A `penalty` that
    broadcasts to that shape is subtracted.
    """
    _require(tokens.ndim == 3, "tokens", tokens, "[batch, tokens, width]")
    similarity: Tensor = _ops.cosine_similarity(tokens.detach(), parts, penalty)
    return similarity


def facility_location(similarity: Tensor, num_select: int, least: float = LEAST_COSINE) -> Tensor:
    """Greedy destinations by facility location: `[B, n, m]` -> `int64 [B, k]`, in the order of picking.

    See `reference.facility_location` for the formula and for `least`.
    """
    _require(similarity.ndim == 3, "similarity", similarity, "[batch, candidates, tokens]")
    if not 1 <= num_select <= similarity.shape[1]:
        raise ValueError(f"num_select={num_select} is not allowed: from 1 to the {similarity.shape[1]} candidates.")
    picks: Tensor = _ops.facility_location(similarity, num_select, least)
    return picks


def merge_weights(
    tokens: Tensor,
    destinations: Tensor,
    scale: float,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """A = softmax(scale · S) over the destinations: `[B, n, d]`, `[B, k]` -> `[B, k, n]`, columns sum to 1.

    See `reference.merge_weights` for S and the other arguments.
    """
    _require_destinations(tokens, destinations, parts)
    weights: Tensor = _ops.merge_weights(
        tokens.detach(), destinations, scale, None if sources is None else sources.detach(), penalty, parts
    )
    return weights


def nearest_destinations(
    tokens: Tensor,
    destinations: Tensor,
    sources: Tensor | None = None,
    penalty: Tensor | None = None,
    parts: int = 1,
) -> Tensor:
    """Which destination every token is nearest to: `[B, n, d]`, `[B, k]` -> `int64 [B, n]`."""
    _require_destinations(tokens, destinations, parts)
    nearest: Tensor = _ops.nearest_destinations(
        tokens.detach(), destinations, None if sources is None else sources.detach(), penalty, parts
    )
    return nearest


def merge(tokens: Tensor, weights: Tensor) -> Tensor:
    """M X, the weighted mean of what merges into each destination: `[B, n, C]`, `[B, k, n]` -> `[B, k, C]`."""
    expected = f"[{weights.shape[0]}, {weights.shape[2]}, width], as the weights say"
    _require(tokens.ndim == 3 and tokens.shape[:2] == (weights.shape[0], weights.shape[2]), "tokens", tokens, expected)
    return reference.merge(tokens, weights)


def unmerge(merged: Tensor, weights: Tensor) -> Tensor:
    """Aᵀ Y, merged tokens spread back over all tokens: `[B, k, C]`, `[B, k, n]` -> `[B, n, C]`."""
    expected = f"[{weights.shape[0]}, {weights.shape[1]}, width], as the weights say"
    _require(merged.ndim == 3 and merged.shape[:2] == weights.shape[:2], "merged", merged, expected)
    return reference.unmerge(merged, weights)


def _require_destinations(tokens: Tensor, destinations: Tensor, parts: int) -> None:
    _require(tokens.ndim == 3, "tokens", tokens, "[batch, tokens, width]")
    fits = destinations.ndim == 2 and destinations.shape[0] * parts == tokens.shape[0]
    _require(fits, "destinations", destinations, "[batch, k]" if parts == 1 else f"[batch / {parts}, k]")


def _require(holds: bool, name: str, tensor: Tensor, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {expected}.")
