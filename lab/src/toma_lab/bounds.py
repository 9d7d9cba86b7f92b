"""ToMA with parts of it replaced by something cheaper or simpler, for two purposes: bounds of its time, and the rows of
the paper's tables that compare it with other choices.

| method | destinations | weights |
|---|---|---|
| `bound-projection` | fixed, at random | fixed, at random: nothing is selected or weighed |
| `bound-slice` | the first tokens | none: the other tokens are dropped, nothing is merged |
| `random` | fixed, at random | as in ToMA |
| `strided` | fixed, every n-th | as in ToMA |
| `pseudo-inverse` | as in ToMA | as in ToMA, but merged tokens are spread back by M⁺, the least-squares solution |

No selection can be faster than the first, no merging faster than the second. Both turn images into noise.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from toma_diffusion import ops
from toma_diffusion.checks import check_one_of
from toma_diffusion.merge import Action, Grid, MergePlan, Regions
from toma_diffusion.merge.assignment import Assignment, HardAssignment, SoftAssignment
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.place import ToMA
from toma_diffusion.merge.plan import Multiplications
from toma_diffusion.ops.backend import Backend
from toma_diffusion.ops.reference import unmerge_by_pseudo_inverse
from toma_diffusion.others import register_method

SELECTIONS = ("facility-location", "random", "strided", "none", "slice")
UNMERGES = ("transpose", "pseudo-inverse")
_WITHOUT_TOKENS = ("none", "slice")
"""Selections that do not depend on tokens, neither for destinations nor for weights."""
_SEED = 0
"""Fixed choices come from a generator of their own: torch's random state is never changed."""


@dataclass(frozen=True, kw_only=True)
class Replaced(Merge):
    """Settings of ToMA, and what is replaced."""

    label: ClassVar[str] = "ToMA, partly replaced"

    selection: str = "facility-location"
    """How destinations are selected: `facility-location`, as in ToMA; `random` or `strided`, both fixed; `none`, with
    fixed random weights too; or `slice`, the first tokens, the others being dropped."""

    unmerge: str = "transpose"
    """How results are spread back to all tokens: `transpose`, as in ToMA, or `pseudo-inverse`, which is much slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("selection", self.selection, SELECTIONS)
        check_one_of("unmerge", self.unmerge, UNMERGES)


@dataclass(frozen=True, kw_only=True)
class Projection(Replaced):
    """A bound of any selection's time."""

    selection: str = "none"


@dataclass(frozen=True, kw_only=True)
class Slice(Replaced):
    """A bound of any merging's time."""

    selection: str = "slice"


@dataclass(frozen=True, kw_only=True)
class Random(Replaced):
    """Destinations at random, the same ones in every step."""

    selection: str = "random"


@dataclass(frozen=True, kw_only=True)
class Strided(Replaced):
    """Every n-th token of a region is a destination."""

    selection: str = "strided"


@dataclass(frozen=True, kw_only=True)
class LeastSquares(Replaced):
    """Results are spread back by the pseudo-inverse."""

    unmerge: str = "pseudo-inverse"


class ReplacedPlan(MergePlan):
    """A plan whose destinations or weights are fixed, or that spreads tokens back in another way."""

    config: Replaced

    def __init__(self, grid: Grid, config: Replaced, **settings: Any) -> None:
        super().__init__(grid, config, **settings)
        self._is_fixed = not self.is_identity and config.selection != "facility-location"
        """Whether destinations are."""
        if not self._is_fixed:
            return
        if config.selection == "slice":
            self.positions.copy_(torch.arange(self.num_destinations, device=self.device))
            self.has_destinations = True
        else:
            choice = fixed_choice(config.selection, self.regions, self.destinations_per_region)
            self.set_destinations(choice.to(self.device))
        if config.selection == "none":
            _fix(self.assignment)
        self.has_weights = config.selection in _WITHOUT_TOKENS

    def make_assignment(self, soft: type[SoftAssignment] = SoftAssignment) -> Assignment:
        if self.config.selection == "slice":
            return SliceAssignment(self.grid.num_tokens, self.num_destinations)
        return super().make_assignment(PseudoInverse if self.config.unmerge == "pseudo-inverse" else soft)

    @property
    def backends(self) -> dict[str, Backend]:
        unused = {"selection"} if self._is_fixed else set()
        if self.config.selection in _WITHOUT_TOKENS:
            unused.add("weights")
        return {operator: backend for operator, backend in super().backends.items() if operator not in unused}

    def multiplications(self, width: int) -> Multiplications:
        cost = super().multiplications(width)
        cost = cost._replace(selection=0.0) if self._is_fixed else cost
        return cost._replace(weights=0.0) if self.config.selection in _WITHOUT_TOKENS else cost

    def wants(self, action: Action) -> bool:
        return self.config.selection not in _WITHOUT_TOKENS and super().wants(action)

    def update(self, tokens: Tensor, action: Action) -> None:
        keeps = self._is_fixed and action is Action.SELECT
        super().update(tokens, Action.REWEIGH if keeps else action)

    def forget(self) -> None:
        super().forget()
        self.has_destinations = self.has_destinations or self._is_fixed
        self.has_weights = self._is_fixed and self.config.selection in _WITHOUT_TOKENS


class PseudoInverse(SoftAssignment):
    """Spreads merged tokens back by M⁺."""

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        regions = merged.reshape(*self.weights.shape[:2], -1)  # [B·R, k, C]
        tokens = self.regions.join(unmerge_by_pseudo_inverse(regions, self.weights))
        return tokens if residual is None else residual + tokens

    def backends(self, gradients: Collection[str]) -> dict[str, Backend]:
        reason = "" if self.backend == "torch" else "the pseudo-inverse has no kernel"
        return super().backends(gradients) | {"unmerging": Backend("torch", reason)}


class SliceAssignment(Assignment):
    """Keeps the first tokens and drops the others. Nothing is merged."""

    is_hard = True

    def __init__(self, num_tokens: int, num_destinations: int) -> None:
        self.num_tokens = num_tokens
        self.num_destinations = num_destinations

    def update(self, tokens: Tensor, destinations: Tensor) -> None:
        """Nothing depends on the tokens."""

    def merge(self, tokens: Tensor) -> Tensor:
        return tokens.narrow(1, 0, self.num_destinations)

    def unmerge(self, merged: Tensor, residual: Tensor | None = None) -> Tensor:
        """The merged tokens, then zeros."""
        tokens = functional.pad(merged, (0, 0, 0, self.num_tokens - self.num_destinations))
        return tokens if residual is None else residual + tokens

    def backends(self, gradients: Collection[str]) -> dict[str, Backend]:
        return dict.fromkeys(("merging", "unmerging"), Backend("torch"))

    def matrix(self) -> Tensor:
        """Ones for the tokens that are kept, nothing for the others."""
        return torch.eye(self.num_destinations, self.num_tokens)[None]

    def buffers(self) -> list[Tensor]:
        return []


def fixed_choice(selection: str, regions: Regions, count: int) -> Tensor:
    """[R, k]: strided, or at random."""
    if selection == "strided":
        return (torch.arange(count) * regions.size // count).expand(regions.count, -1)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.rand(regions.count, regions.size, generator=generator).argsort(dim=-1)[:, :count]


def _fix(assignment: Assignment | None) -> None:
    """Set random weights, the same in all samples; with a hard assignment, no destination stays empty."""
    generator = torch.Generator().manual_seed(_SEED)
    if isinstance(assignment, SoftAssignment):
        assignment.weights.copy_(torch.randn(assignment.weights.shape[1:], generator=generator).softmax(dim=-2))
        ops.mean_weights(assignment.weights, out=assignment.means)
    elif isinstance(assignment, HardAssignment):
        regions = assignment.regions
        per_region = assignment.num_destinations // regions.count
        slots = torch.arange(regions.size).remainder(per_region)
        shuffled = torch.rand(regions.count, regions.size, generator=generator).argsort(dim=-1)
        merged = slots[shuffled] + torch.arange(regions.count)[:, None] * per_region
        assignment.targets.copy_(regions.join(merged[:, :, None])[:, :, 0])
        assignment.index()


class ReplacedMethod(ToMA):
    """ToMA with one of these plans."""

    plan_class = ReplacedPlan

    def describe(self, config: Merge) -> list[str]:
        assert isinstance(config, Replaced)
        return [f"replaced: selection {config.selection}, unmerge {config.unmerge}", *super().describe(config)[1:]]


for _name, _settings in (
    ("bound-projection", Projection),
    ("bound-slice", Slice),
    ("random", Random),
    ("strided", Strided),
    ("pseudo-inverse", LeastSquares),
):
    register_method(type(f"{_settings.__name__}Method", (ReplacedMethod,), {"name": _name, "config_class": _settings}))
