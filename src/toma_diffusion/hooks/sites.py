"""Merge sites: the forward hooks that put fewer tokens through a module, a block or a run of blocks.

They are plain `torch.nn.Module` hooks, so they compose with whatever else wraps a module's forward (LoRA, offloading,
caches, IP-Adapter, compilation). Each is an object, so that copying a model copies its hooks and their shared state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from toma_diffusion.core import Plan
from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.state import MergeState, Slot

if TYPE_CHECKING:
    from toma_diffusion.hooks.reuse import Part

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Hook:
    """Marks the hooks of this package, so that they can be found and removed."""

    before = True
    """Whether it runs before the module (a forward pre-hook) or after it (a forward hook)."""


def never(keywords: Keywords) -> bool:
    """For sites that are always merged. A named function, so that hooks can be pickled."""
    return False


@dataclass(eq=False)
class Site:
    """One place where tokens are merged: which plan it uses, and when it must not be merged."""

    state: MergeState
    slot: Slot
    """Sites of one slot share a plan."""
    leave_alone: Callable[[Keywords], bool] = never
    """Whether a call with these keyword arguments must not be merged."""

    def plan(self, keywords: Keywords) -> Plan | None:
        """The plan to use in this call, or None if the module is not merged."""
        if not self.state.active or self.leave_alone(keywords):
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
        """Where the image begins in a sequence: text may come before it, reference images after it."""
        image_tokens = self.state.image_tokens or plan.grid.num_tokens
        return length - image_tokens + (plan.grid.num_tokens - plan.num_destinations if merged else 0)

    def image(self, plan: Plan, tokens: Tensor) -> Tensor:
        """The part of the sequence that is the image grid."""
        start = self.image_start(tokens.shape[1], plan)
        return tokens.narrow(1, start, plan.grid.num_tokens)

    def merge(self, plan: Plan, tokens: Tensor) -> Tensor:
        """Merge the image grid in a sequence [text, image, references]; the rest is unchanged."""
        start = self.image_start(tokens.shape[1], plan)
        return _replace(tokens, 1, start, plan.grid.num_tokens, plan.merge)

    def unmerge(self, plan: Plan, tokens: Tensor) -> Tensor:
        """The inverse of `merge` on sequences."""
        start = self.image_start(tokens.shape[1], plan, merged=True)
        return _replace(tokens, 1, start, plan.num_destinations, plan.unmerge)

    def unmerge_onto(self, whole: Tensor, plan: Plan, change: Tensor) -> Tensor:
        """`whole` + the unmerged `change`; in one kernel if the sequence is only the image."""
        if change.shape[1] == plan.num_destinations:
            return plan.unmerge(change, residual=whole)
        return whole + self.unmerge(plan, change)

    def gather(self, plan: Plan, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Position tables with the image grid's rows reduced to those of the destinations."""
        start = self.image_start(tables[0].shape[0], plan)
        return tuple(_replace(table, 0, start, plan.grid.num_tokens, plan.gather) for table in tables)


@dataclass(frozen=True)
class KeyBias:
    """How a module takes a bias that is added to the logits of its keys: by a keyword argument."""

    argument: str
    """Its name; `outer.inner` for an entry of a dictionary."""
    dims: int
    """Of the bias: 3 for [B, 1, keys], 4 for [B, 1, 1, keys]."""
    text: str | None = None
    """The keyword argument whose tokens come before `hidden_states` among the keys, if any."""


@dataclass(eq=False)
class MergeInput(Hook):
    """Forward pre-hook: the module sees merged `hidden_states`, and the destinations' rows of its position table."""

    site: Site
    position_table: str | None = None
    key_bias: KeyBias | None = None
    check: Callable[[Keywords], object] = never
    """Raises if a call with these keyword arguments cannot be merged."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Merge before the module."""
        plan = self.site.plan(kwargs)
        if plan is None:
            return None
        self.check(kwargs)
        tokens = get_hidden_states(args, kwargs)
        self.site.update(plan, lambda: self.site.image(plan, tokens))
        args, kwargs = set_hidden_states(args, kwargs, self.site.merge(plan, tokens))
        kwargs = gather_positions(self.site, plan, self.position_table, kwargs)
        return args, bias_keys(self.site, plan, self.key_bias, args, kwargs)


@dataclass(eq=False)
class UpdatePlan(Hook):
    """Forward pre-hook of a block: its plan is made from the tokens that come into it, before any norm."""

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Update the plan before the block."""
        plan = self.site.plan(kwargs)
        if plan is not None:
            tokens = get_hidden_states(args, kwargs)
            self.site.update(plan, lambda: self.site.image(plan, tokens))


@dataclass(eq=False)
class GatherPositions(Hook):
    """Forward pre-hook of a module whose input is merged already: only its position table is still whole."""

    site: Site
    position_table: str
    key_bias: KeyBias | None = None

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Replace the position table before the module."""
        plan = self.site.plan(kwargs)
        if plan is None:
            return None
        kwargs = gather_positions(self.site, plan, self.position_table, kwargs)
        return args, bias_keys(self.site, plan, self.key_bias, args, kwargs)


@dataclass(eq=False)
class MergeOutput(Hook):
    """Forward hook: what the module returns (or the first of what it returns) is merged."""

    before = False

    site: Site

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """Merge after the module."""
        plan = self.site.plan(kwargs)
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
        """Unmerge after the module."""
        plan = self.site.plan(kwargs)
        if plan is None:
            return output
        if isinstance(output, Tensor):
            return self.site.unmerge(plan, output)
        return type(output)(
            self.site.unmerge(plan, item) if index in self.streams else item for index, item in enumerate(output)
        )


@dataclass(eq=False)
class Run:
    """Consecutive blocks that stay merged together. Holds X and M X while they run."""

    whole: Tensor | None = None
    merged: Tensor | None = None
    part: Part | None = None
    """What is remembered of these blocks, if merging corrects it."""


@dataclass(eq=False)
class EnterBlock(Hook):
    """Forward pre-hook of a block in a run: the first one merges, all use the positions of the destinations."""

    site: Site
    run: Run
    first: bool
    normalize: Callable[[nn.Module, Arguments, Keywords], Tensor]
    """The tokens that the block's first layer sees; destinations are chosen among them."""
    position_table: str | None = None
    key_bias: KeyBias | None = None

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
        """Merge before the block."""
        plan = self.site.plan(kwargs)
        if plan is None:
            return None
        if self.first or self.site.state.block_by_block:
            self.site.update(plan, lambda: self.site.image(plan, self.normalize(module, args, kwargs)))
            self.run.whole = get_hidden_states(args, kwargs)
            self.run.merged = self.site.merge(plan, self.run.whole)
            new_args, new_kwargs = set_hidden_states(args, kwargs, self.run.merged)
        else:
            new_args, new_kwargs = args, kwargs
        new_kwargs = gather_positions(self.site, plan, self.position_table, new_kwargs)
        return new_args, bias_keys(self.site, plan, self.key_bias, new_args, new_kwargs)


@dataclass(eq=False)
class LeaveBlock(Hook):
    """Forward hook of a block in a run: the last one returns X + U(blocks(M X) − M X).

    Unmerging the change, not the result, keeps the full detail of what the blocks do not change. If a change C is
    remembered and to be corrected, it returns X + C + U(blocks(M X) − M X − M C); or X + C, where C has the new change
    in the rows of the destinations.
    """

    before = False

    site: Site
    run: Run
    last: bool
    stream: int | None = None
    """Which of several outputs is the image stream; None if the output is a single tensor."""
    only_destinations: bool = False
    """Whether a correction replaces the change of the destinations alone."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """Unmerge after the block."""
        plan = self.site.plan(kwargs)
        if plan is None or not (self.last or self.site.state.block_by_block):
            return output
        whole, merged = self.run.whole, self.run.merged
        if whole is None or merged is None:
            raise RuntimeError("the first block of this run was skipped, so its tokens were never merged.")
        self.run.whole = self.run.merged = None
        result = output if self.stream is None else output[self.stream]
        if self.site.state.correcting and self.run.part is not None:
            result = whole + self._corrected(plan, self.run.part, result - merged)
        else:
            result = self.site.unmerge_onto(whole, plan, result - merged)
        if self.stream is None:
            return result
        return tuple(result if index == self.stream else item for index, item in enumerate(output))

    def _corrected(self, plan: Plan, part: Part, change: Tensor) -> Tensor:
        """The remembered change, with what merged tokens say about it."""
        memory = part.memory
        if memory is None:
            raise RuntimeError(f"nothing is remembered of {part.name}.")
        remembered = memory.recall()[0]
        if self.only_destinations:
            start = self.site.image_start(remembered.shape[1], plan)
            new = change.narrow(1, self.site.image_start(change.shape[1], plan, merged=True), plan.num_destinations)
            return plan.place(remembered, new, start)
        return self.site.unmerge_onto(remembered, plan, change - self.site.merge(plan, remembered))


def get_hidden_states(args: Arguments, kwargs: Keywords) -> Tensor:
    """The tokens, passed by name or first."""
    tokens: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return tokens


def set_hidden_states(args: Arguments, kwargs: Keywords, tokens: Tensor) -> tuple[Arguments, Keywords]:
    """The same arguments with other tokens."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": tokens}
    return (tokens, *args[1:]), kwargs


def gather_positions(site: Site, plan: Plan, position_table: str | None, kwargs: Keywords) -> Keywords:
    """The same keyword arguments with the position table, if there is one, reduced to the destinations' rows."""
    if position_table is None or kwargs.get(position_table) is None:
        return kwargs
    return {**kwargs, position_table: site.gather(plan, kwargs[position_table])}


def bias_keys(site: Site, plan: Plan, how: KeyBias | None, args: Arguments, kwargs: Keywords) -> Keywords:
    """The same keyword arguments with the logarithm of every merged token's size as a bias of its key, if wanted."""
    sizes = plan.log_sizes
    if how is None or sizes is None:
        return kwargs
    hidden_states = get_hidden_states(args, kwargs)
    text = kwargs.get(how.text) if how.text is not None else None
    length = hidden_states.shape[1] + (0 if text is None else text.shape[1])
    start = site.image_start(length, plan, merged=True)
    bias = functional.pad(sizes.to(hidden_states.dtype), (start, length - start - sizes.shape[1]))[:, None]
    outer, _, inner = how.argument.rpartition(".")
    taken = (kwargs.get(outer) or {}) if outer else kwargs
    if taken.get(inner) is not None:
        raise UsageError(
            f"self-attention got an {inner}, which size_aware_attention cannot be combined with: leave one of them out."
        )
    taken = {**taken, inner: bias if how.dims == 3 else bias[:, None]}
    return {**kwargs, outer: taken} if outer else taken


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
    before, part = tensor.narrow(dim, 0, start), tensor.narrow(dim, start, length)
    return torch.cat([before, change(part), tensor.narrow(dim, end, tensor.shape[dim] - end)], dim=dim)


def remove_hooks(module: nn.Module, chosen: Callable[[object], bool]) -> None:
    """Take the chosen forward hooks of a module out, without a trace."""
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if chosen(hook)]:
            del hooks[key]
            with_kwargs.pop(key, None)
