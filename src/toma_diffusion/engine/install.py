"""Installs what makes a denoiser faster: the hooks inside it, and the one that reads each of its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.clock import DENOISERS
from toma_diffusion.engine.compile import IF_EXPORT, Compiled, hold_compiler, release_compiler
from toma_diffusion.engine.hooks import Hook, Placement, remove_hooks
from toma_diffusion.engine.session import Session, Technique
from toma_diffusion.errors import UsageError


class Outermost(Technique, Protocol):
    """A technique that stands in front of the denoiser's call, and decides whether it runs."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model calls it."""

    def put(self) -> None:
        """Take the place of the model's call."""

    def take_out(self) -> None:
        """Put back what was there before."""

    def join(self, args: Arguments, kwargs: Keywords) -> None:
        """Take part in a call that has begun without it."""


class Inside(Technique, Protocol):
    """A technique that works inside the denoiser, by hooks."""

    keeps_plans: bool
    """Whether buffers of earlier generations are kept, because CUDA graphs read them."""

    def before_call(self, model: nn.Module, given: Given) -> None:
        """Prepare for a call of the denoiser, outside compiled code."""


@dataclass(eq=False)
class RootHook(Hook):
    """Runs before every call of the denoiser: reads the call and sets the state. Never part of a compiled graph."""

    session: Session
    check: Callable[[nn.Module], None]
    """Raises if the model was changed in a way that is not allowed."""
    compiled_blocks: Callable[[nn.Module], list[nn.Module]]
    """The modules that are compiled one by one in mode `blocks`."""
    graphs_obstacle: Callable[[nn.Module], str | None]
    """Why the model cannot be captured as CUDA graphs, if so."""
    placements: list[Placement] = field(default_factory=list)
    inside: Inside | None = None
    """Merges tokens; None if none are merged."""
    outermost: Outermost | None = None
    """Skips steps; None if none is skipped."""
    compiled: Compiled | None = None
    """What `handle.compile` did, so that `remove` can undo it."""

    def forget(self) -> None:
        for technique in self.session.techniques:
            technique.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, compiled=None)  # what is compiled is never copied
        hold_compiler(self, _keep_root_out)  # a pickled model may be loaded in a process that has not compiled yet

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        if self.outermost is not None and not self.outermost.is_in_place:  # a copy, or the user has compiled the model
            self.outermost.put()
            self.outermost.join(args, kwargs)
        refuse_export(module)
        if self.session.enabled:
            self.check(module)
        for placement in self.placements:
            placement.follow()
        if self.inside is not None:
            self.inside.before_call(module, Given(self.names, args, kwargs))
        elif self.session.tick is not None:  # what stands outermost has read it
            self.session.begin_call(self.session.tick)


def refuse_export(model: nn.Module) -> None:
    """Raise in `torch.export`: what is traced would be one step of many."""
    if torch.compiler.is_exporting():
        raise UsageError(
            f"this {type(model).__name__} cannot be exported while it is sped up: call handle.remove() first."
        )


def install(roots: Mapping[nn.Module, RootHook]) -> None:
    for model, root in roots.items():
        hold_compiler(root, _keep_root_out)
        for placement in [Placement(model, None, root), *root.placements]:
            placement.put()
        if root.outermost is not None:
            root.outermost.put()


def uninstall(model: nn.Module, root: RootHook) -> None:
    """The model is what it was before, bit for bit, and compiled as it was before."""
    if root.outermost is not None:
        root.outermost.take_out()
    if root.compiled is not None:
        root.compiled.undo(model)
        root.compiled = None
    for placement in root.placements:
        placement.take_out()
    remove_hooks(model, lambda hook: isinstance(hook, Hook))
    release_compiler(root)


def _keep_root_out() -> None:
    RootHook.__call__ = torch.compiler.disable(  # type: ignore[method-assign]
        RootHook.__call__, reason=IF_EXPORT
    )


def find_root(model: nn.Module) -> RootHook | None:
    """The root hook of `model`, if it was made faster."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RootHook)), None)


def find_denoisers(pipe: Any) -> list[nn.Module]:
    """All denoisers of a pipeline, or the model itself."""
    if isinstance(pipe, nn.Module):
        return [upstream.unwrap_compiled(pipe)]
    found = [getattr(pipe, name, None) for name in DENOISERS]
    models = [upstream.unwrap_compiled(model) for model in found if isinstance(model, nn.Module)]
    if models:
        return list(dict.fromkeys(models))
    raise UsageError(f"{type(pipe).__name__} is neither a model nor a pipeline with a {' or a '.join(DENOISERS[:2])}.")
