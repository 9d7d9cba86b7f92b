"""Installs hooks in a model: those of modules, and the one that reads every call of the denoiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.compile import prepare_compiler
from toma_diffusion.engine.summary import BlockRecord
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.sites import Hook, remove_hooks
from toma_diffusion.merge.state import Call, MergeState


@dataclass(eq=False)
class Placement:
    """A hook and its place: the module of that name in the parent, or the parent itself."""

    parent: nn.Module
    name: str | None
    hook: Hook

    def __post_init__(self) -> None:
        self.module = self._target()
        self.hook.bind(self.module)
        self._may_move = self.name is not None and hasattr(self.module, "weight")  # a single layer, wrapped or not

    def put(self) -> None:
        """Register the hook."""
        if self.hook.before:
            self.module.register_forward_pre_hook(self.hook, with_kwargs=True)  # type: ignore[arg-type]
        else:
            self.module.register_forward_hook(self.hook, with_kwargs=True)  # type: ignore[arg-type]

    def follow(self) -> None:
        """Move the hook if its module was replaced: LoRA wraps single layers, and unwraps them."""
        if not self._may_move or (target := self._target()) is self.module:
            return
        remove_hooks(self.module, lambda hook: hook is self.hook)
        self.module = target
        self.hook.bind(target)
        self.put()

    def take_out(self) -> None:
        """Remove all hooks of this package from the module."""
        remove_hooks(self.module, lambda hook: isinstance(hook, Hook))

    def _target(self) -> nn.Module:
        return self.parent if self.name is None else self.parent.get_submodule(self.name)


class Outermost(Protocol):
    """What stands in front of the denoiser's call, and decides whether it runs."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model calls it."""

    @property
    def counts(self) -> tuple[int, int]:
        """How many steps of the current or the last generation were computed, and how many predicted."""

    @property
    def num_bytes(self) -> int:
        """Memory held by what is kept."""

    def put(self) -> None:
        """Take the place of the model's call."""

    def take_out(self) -> None:
        """Put back what was there before."""

    def join(self, args: Arguments, kwargs: Keywords) -> None:
        """Take part in a call that has begun without it."""

    def forget(self) -> None:
        """Begin anew."""

    def lines(self) -> tuple[str, ...]:
        """What it does, for `summary()`."""


@dataclass(eq=False)
class RootHook(Hook):
    """Runs before every call of the denoiser: reads the call and sets the state. Never part of a compiled graph."""

    state: MergeState
    read_call: Callable[[nn.Module, Given], Call]
    check: Callable[[nn.Module], None]
    """Raises if the model was changed in a way that merging does not allow."""
    compiled_blocks: Callable[[nn.Module], list[nn.Module]]
    """The modules that are compiled one by one in mode `blocks`."""
    graphs_obstacle: Callable[[nn.Module], str | None]
    """Why the model cannot be captured as CUDA graphs, if so."""
    records: list[BlockRecord] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    outermost: Outermost | None = None
    """Skips steps; None if none is skipped."""
    is_compiled: bool = False
    """Whether `handle.compile` was called, so that `remove` must undo it."""

    def forget(self) -> None:
        """Forget all choices and outputs."""
        self.state.forget_choices()
        if self.outermost is not None:
            self.outermost.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        prepare_compiler(_keep_root_out)  # a pickled model may be loaded in a process that has not merged anything yet

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Forward pre-hook of the denoiser."""
        if self.outermost is not None and not self.outermost.is_in_place:  # a copy, or the user has compiled the model
            self.outermost.put()
            self.outermost.join(args, kwargs)
        if self.state.enabled:
            self.check(module)
        for placement in self.placements:
            placement.follow()
        try:
            call = self.read_call(module, Given(self.names, args, kwargs))
        except UsageError:  # inputs that cannot be merged
            if self.state.enabled and self.state.may_merge:
                raise
            self.state.leave_alone()
        else:
            self.state.begin_call(module, call)


def install(roots: Mapping[nn.Module, RootHook]) -> None:
    """Register the hooks of every model and its modules."""
    prepare_compiler(_keep_root_out)
    for model, root in roots.items():
        for placement in [Placement(model, None, root), *root.placements]:
            placement.put()
        if root.outermost is not None:
            root.outermost.put()


def _keep_root_out() -> None:
    RootHook.__call__ = torch.compiler.disable(RootHook.__call__)  # type: ignore[method-assign]


def find_root(model: nn.Module) -> RootHook | None:
    """The root hook of `model`, if tokens are merged in it."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RootHook)), None)
