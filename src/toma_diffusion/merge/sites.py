"""Merge sites: the forward hooks that put fewer tokens through a module, a block or a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.merge import Plan
from toma_diffusion.merge.state import MergeState, Slot, image_start


def never(given: Given) -> bool:
    """For sites that are always merged. A named function, so that hooks can be pickled."""
    return False


@dataclass(eq=False)
class Site:
    """One place where tokens are merged: which plan it uses, and when it must not be merged."""

    state: MergeState
    slot: Slot
    """Sites of one slot share a plan."""
    leave_whole: Callable[[Given], bool] = never
    """Whether a call with these arguments must not be merged."""

    def plan(self, given: Given) -> Plan | None:
        if not self.state.active or self.leave_whole(given):
            return None
        plan = self.slot.plan
        return None if plan is None or plan.is_identity else plan

    def update(self, plan: Plan, tokens: Callable[[], Tensor]) -> None:
        """Update the plan if this is the first site of its slot in this call and the schedule says so."""
        if self.slot.awaits_tokens:
            self.slot.awaits_tokens = False
            if plan.wants(self.state.action):
                plan.update(tokens(), self.state.action)

    def image_start(self, length: int, plan: Plan, merged: bool = False) -> int:
        """Where the image begins in a sequence: text may come before or after it, reference images after it."""
        removed = plan.grid.num_tokens - plan.num_destinations if merged else 0
        return image_start(length + removed, self.state.image_at, plan.grid)

    def image(self, plan: Plan, tokens: Tensor) -> Tensor:
        """The part of the sequence that is the image grid."""
        start = self.image_start(tokens.shape[1], plan)
        return tokens.narrow(1, start, plan.grid.num_tokens)

    def merge(self, plan: Plan, tokens: Tensor) -> Tensor:
        """Merge the image grid in a sequence; the rest is unchanged."""
        start = self.image_start(tokens.shape[1], plan)
        return _replace(tokens, 1, start, plan.grid.num_tokens, plan.merge)

    def unmerge(self, plan: Plan, tokens: Tensor) -> Tensor:
        start = self.image_start(tokens.shape[1], plan, merged=True)
        return _replace(tokens, 1, start, plan.num_destinations, plan.unmerge)

    def unmerge_onto(self, whole: Tensor, plan: Plan, change: Tensor) -> Tensor:
        """`whole` + the unmerged `change`; in one kernel if the sequence is only the image."""
        if change.shape[1] == plan.num_destinations:
            return plan.unmerge(change, residual=whole)
        return whole + self.unmerge(plan, change)

    def gather(self, plan: Plan, table: Tensor, dims: tuple[int, ...]) -> Tensor:
        """A table with the image grid's rows in these dimensions reduced to those of the destinations."""
        for dim in dims:
            length = table.shape[dim]
            if length > 1:  # one row for all tokens stays
                start = self.image_start(length, plan)
                table = _replace(table, dim, start, plan.grid.num_tokens, partial(plan.gather, dim=dim))
        return table


@dataclass(frozen=True)
class PerToken:
    """An argument with a row for every token of a sequence: positions, modulation, a mask."""

    name: str
    """`outer.inner` for an entry of a dictionary."""
    dims: tuple[int, ...] = (0,)
    """In which its rows lie. Two for a mask of queries and keys."""
    item: int | None = None
    """Which item of a tuple has the rows of the image; None if all have, or if it is no tuple."""
    ndim: int | None = None
    """Its number of dimensions, if with another one it has no rows for tokens. None: any."""


@dataclass(eq=False)
class MergeInput(Hook):
    """Forward pre-hook: the module sees merged tokens, and of other arguments the destinations' rows."""

    site: Site
    per_token: tuple[PerToken, ...] = ()
    check: Callable[[Given], object] = never
    """Raises if a call with these arguments cannot be merged."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        self.check(given)
        tokens = given.tokens
        self.site.update(plan, lambda: self.site.image(plan, tokens))
        given = given.with_tokens(self.site.merge(plan, tokens))
        given = gather_rows(self.site, plan, self.per_token, given)
        return given.args, given.kwargs


@dataclass(eq=False)
class UpdatePlan(Hook):
    """Forward pre-hook of a block: its plan is made from the tokens that come into it, before any norm."""

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is not None:
            self.site.update(plan, lambda: self.site.image(plan, given.tokens))


@dataclass(eq=False)
class GatherRows(Hook):
    """Forward pre-hook of a module whose tokens are merged already: other arguments still have rows for all."""

    site: Site
    per_token: tuple[PerToken, ...]

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        given = gather_rows(self.site, plan, self.per_token, given)
        return given.args, given.kwargs


@dataclass(eq=False)
class MergeOutput(Hook):
    """Forward hook: what the module returns (or the first of what it returns) is merged."""

    before = False

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        plan = self.site.plan(Given(self.names, args, kwargs))
        if plan is None:
            return output
        tokens = output[0] if isinstance(output, tuple) else output
        self.site.update(plan, lambda: self.site.image(plan, tokens))
        merged = self.site.merge(plan, tokens)
        return (merged, *output[1:]) if isinstance(output, tuple) else merged


@dataclass(eq=False)
class UnmergeOutput(Hook):
    """Forward hook: the image streams of what the module returns get their full length back."""

    before = False

    site: Site
    streams: tuple[int, ...] = (0,)
    """Which of several outputs are image streams. Text never is."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        plan = self.site.plan(Given(self.names, args, kwargs))
        if plan is None:
            return output
        if isinstance(output, Tensor):
            return self.site.unmerge(plan, output)
        return type(output)(
            self.site.unmerge(plan, item) if index in self.streams else item for index, item in enumerate(output)
        )


@dataclass(eq=False)
class Stage:
    """Consecutive blocks that stay merged together. Holds X and M X while they run."""

    whole: Tensor | None = None
    merged: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"whole": None, "merged": None}


@dataclass(eq=False)
class EnterBlock(Hook):
    """Forward pre-hook of a block in a stage: the first one merges, all use the positions of the destinations."""

    site: Site
    stage: Stage
    first: bool
    normalize: Callable[[nn.Module, Given], Tensor]
    """The tokens that the block's first layer sees; destinations are chosen among them."""
    per_token: tuple[PerToken, ...] = ()
    writes_in_place: bool = False
    """Whether the block writes into the tokens that it gets."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        given = Given(self.names, args, kwargs)
        plan = self.site.plan(given)
        if plan is None:
            return None
        if self.first or self.site.state.block_by_block:
            self.site.update(plan, lambda: self.site.image(plan, self.normalize(module, given)))
            merged = self.site.merge(plan, given.tokens)
            self.stage.whole, self.stage.merged = given.tokens, merged
            reduced = given.with_tokens(merged.clone() if self.writes_in_place else merged)
        else:
            reduced = given
        reduced = gather_rows(self.site, plan, self.per_token, reduced)
        return reduced.args, reduced.kwargs


@dataclass(eq=False)
class LeaveBlock(Hook):
    """Forward hook of a block in a stage: the last one returns X + U(blocks(M X) − M X).

    Unmerging the change, not the result, keeps the full detail of what the blocks do not change.
    """

    before = False

    site: Site
    stage: Stage
    last: bool
    stream: int | None = None
    """Which of several outputs is the image stream; None if the output is a single tensor."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        plan = self.site.plan(Given(self.names, args, kwargs))
        if plan is None or not (self.last or self.site.state.block_by_block):
            return output
        whole, merged = self.stage.whole, self.stage.merged
        if whole is None or merged is None:
            raise RuntimeError("the first block of this stage was skipped, so its tokens were never merged.")
        self.stage.whole = self.stage.merged = None
        result = output if self.stream is None else output[self.stream]
        result = self.site.unmerge_onto(whole, plan, result - merged)
        if self.stream is None:
            return result
        return tuple(result if index == self.stream else item for index, item in enumerate(output))


def gather_rows(site: Site, plan: Plan, per_token: tuple[PerToken, ...], given: Given) -> Given:
    """The same arguments; those that have a row for every token reduced to the destinations' rows."""
    for each in per_token:
        value = given[each.name]
        if value is None or (each.ndim is not None and value.ndim != each.ndim):
            continue
        if isinstance(value, (tuple, list)):
            rows: Any = tuple(
                site.gather(plan, item, each.dims) if each.item in (None, index) else item
                for index, item in enumerate(value)
            )
        else:
            rows = site.gather(plan, value, each.dims)
        given = given.with_argument(each.name, rows)
    return given


def _replace(tensor: Tensor, dim: int, start: int, length: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` a part of `tensor` along `dim` and leave the rest."""
    end = start + length
    if start < 0:
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} tokens is too short for the {length} that are to be replaced in it: "
            "something calls this module on pieces of the sequence, which cannot be merged."
        )
    if start == 0 and end == tensor.shape[dim]:
        return change(tensor)
    changed = change(tensor.narrow(dim, start, length))
    if changed.ndim > tensor.ndim:  # a table for all samples, of which each has rows of its own now
        tensor, dim = tensor.expand(changed.shape[0], *tensor.shape), dim + 1
    elif dim > 0 and tensor.shape[0] == 1:  # the same, with a dimension for samples
        tensor = tensor.expand(changed.shape[0], *tensor.shape[1:])
    before, after = tensor.narrow(dim, 0, start), tensor.narrow(dim, end, tensor.shape[dim] - end)
    return torch.cat([before, changed, after], dim=dim)
