"""The four operators of token merging: tensors in, tensors out.

Each is a `torch.library` operator with a fake implementation, so that `torch.compile(fullgraph=True)` passes through.
They are registered with `Library.define`, not `custom_op`: a call then costs 1 µs over a plain function, not 10 µs
(CPU, torch 2.13), and an eager SDXL step makes about 400 of them.

They carry no gradient. Where one is asked for, `merge` and `unmerge` run the plain torch code instead, which has one;
the choice of destinations and weights is a constant to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toma_diffusion.ops import reference
from toma_diffusion.ops.reference import cosine_similarity, facility_location_value

__all__ = [
    "cosine_similarity",
    "facility_location",
    "facility_location_value",
    "merge",
    "merge_weights",
    "unmerge",
]

NAMESPACE = "toma_diffusion"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("facility_location(Tensor similarity, int num_select) -> Tensor")
_library.define("merge_weights(Tensor tokens, Tensor destinations, float scale) -> Tensor")
_library.define("merge(Tensor tokens, Tensor weights) -> Tensor")
_library.define("unmerge(Tensor merged, Tensor weights, bool pseudo_inverse) -> Tensor")
for _operator in (reference.facility_location, reference.merge_weights, reference.merge, reference.unmerge):
    _library.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::facility_location", lib=_library)
def _(similarity: Tensor, num_select: int) -> Tensor:
    return similarity.new_empty((similarity.shape[0], num_select), dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::merge_weights", lib=_library)
def _(tokens: Tensor, destinations: Tensor, scale: float) -> Tensor:
    return tokens.new_empty((tokens.shape[0], destinations.shape[1], tokens.shape[1]))


@torch.library.register_fake(f"{NAMESPACE}::merge", lib=_library)
def _(tokens: Tensor, weights: Tensor) -> Tensor:
    return tokens.new_empty((tokens.shape[0], weights.shape[1], tokens.shape[2]))


@torch.library.register_fake(f"{NAMESPACE}::unmerge", lib=_library)
def _(merged: Tensor, weights: Tensor, pseudo_inverse: bool) -> Tensor:
    return merged.new_empty((merged.shape[0], weights.shape[2], merged.shape[2]))


_ops = getattr(torch.ops, NAMESPACE)


def facility_location(similarity: Tensor, num_select: int) -> Tensor:
    """Greedy destinations by facility location: `[B, n, m]` -> `int64 [B, k]`, in the order of picking.

    See `reference.facility_location` for the formula.
    """
    _require(similarity.ndim == 3, "similarity", similarity, "[batch, candidates, tokens]")
    if not 1 <= num_select <= similarity.shape[1]:
        raise ValueError(f"num_select={num_select} is not allowed: from 1 to the {similarity.shape[1]} candidates.")
    return _ops.facility_location(similarity.detach(), num_select)


def merge_weights(tokens: Tensor, destinations: Tensor, scale: float) -> Tensor:
    """A = softmax(scale · cos) over the destinations: `[B, n, d]`, `[B, k]` -> `[B, k, n]`, columns sum to 1."""
    _require(tokens.ndim == 3, "tokens", tokens, "[batch, tokens, width]")
    _require(
        destinations.ndim == 2 and destinations.shape[0] == tokens.shape[0], "destinations", destinations, "[batch, k]"
    )
    return _ops.merge_weights(tokens.detach(), destinations, scale)


def merge(tokens: Tensor, weights: Tensor) -> Tensor:
    """M X, the weighted mean of what merges into each destination: `[B, n, C]`, `[B, k, n]` -> `[B, k, C]`."""
    expected = f"[{weights.shape[0]}, {weights.shape[2]}, width], as the weights say"
    _require(tokens.ndim == 3 and tokens.shape[:2] == (weights.shape[0], weights.shape[2]), "tokens", tokens, expected)
    if _needs_gradient(tokens):
        return reference.merge(tokens, weights)
    return _ops.merge(tokens, weights)


def unmerge(merged: Tensor, weights: Tensor, method: str = "transpose") -> Tensor:
    """Spread merged tokens back over all tokens: `[B, k, C]`, `[B, k, n]` -> `[B, n, C]`.

    Args:
        method: `transpose` for Aᵀ Y, `pseudo-inverse` for M⁺ Y.
    """
    expected = f"[{weights.shape[0]}, {weights.shape[1]}, width], as the weights say"
    _require(merged.ndim == 3 and merged.shape[:2] == weights.shape[:2], "merged", merged, expected)
    if method not in ("transpose", "pseudo-inverse"):
        raise ValueError(f"method={method!r} is not known: use 'transpose' or 'pseudo-inverse'.")
    if _needs_gradient(merged):
        return reference.unmerge(merged, weights, method == "pseudo-inverse")
    return _ops.unmerge(merged, weights, method == "pseudo-inverse")


def _needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _require(holds: bool, name: str, tensor: Tensor, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {expected}.")
