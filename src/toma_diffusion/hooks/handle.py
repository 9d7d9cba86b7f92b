"""Putting hooks into a model and taking them out again; the handle a user holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from toma_diffusion.hooks.compiler import compile_denoiser, prepare_compiler, undo_compile
from toma_diffusion.hooks.sites import Arguments, Hook, Keywords
from toma_diffusion.hooks.state import Call, MergeState
from toma_diffusion.hooks.summary import BlockRecord, Summary, summarize


@dataclass(eq=False)
class Placement:
    """A hook, and where it belongs: on whatever module the parent has under that name, or on the parent itself."""

    parent: nn.Module
    name: str | None
    hook: Hook

    def __post_init__(self) -> None:
        self.module = self._target()
        self._may_move = self.name is not None and hasattr(self.module, "weight")  # a single layer, wrapped or not

    def put(self) -> None:
        """Register the hook."""
        if self.hook.before:
            self.module.register_forward_pre_hook(self.hook, with_kwargs=True)  # type: ignore[arg-type]
        else:
            self.module.register_forward_hook(self.hook, with_kwargs=True)  # type: ignore[arg-type]

    def follow(self) -> None:
        """Move the hook if the module was replaced since: LoRA wraps single layers in others, and unwraps them."""
        if not self._may_move or (target := self._target()) is self.module:
            return
        _remove_hooks(self.module, lambda hook: hook is self.hook)
        self.module = target
        self.put()

    def _target(self) -> nn.Module:
        return self.parent if self.name is None else self.parent.get_submodule(self.name)


@dataclass(eq=False)
class RootHook(Hook):
    """Before every call of the denoiser: reads the call and sets the state. Never part of a compiled graph."""

    state: MergeState
    read_call: Callable[[nn.Module, Arguments, Keywords], Call]
    check: Callable[[nn.Module], None]
    """Raises if the model has been changed since in a way that does not go with merging."""
    compiled_blocks: Callable[[nn.Module], list[nn.Module]]
    """What is compiled block by block."""
    graphs_obstacle: Callable[[nn.Module], str | None]
    """Why the model cannot be captured as CUDA graphs, if so."""
    records: list[BlockRecord] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    is_compiled: bool = False
    """Whether `handle.compile` was called, so that removing undoes it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        prepare_compiler(_keep_root_out)  # a model that was pickled may come to a process that has merged nothing yet

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Forward pre-hook of the denoiser."""
        if self.state.enabled:
            self.check(module)
        for placement in self.placements:
            placement.follow()
        self.state.begin_call(module, self.read_call(module, args, kwargs))


class ToMAHandle:
    """Token merging on one denoiser: switch it, inspect it, remove it. Also a context manager that removes at the end.

    All of its state lives in the model's hooks, so that a handle holds nothing but the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def enabled(self) -> bool:
        """Whether tokens are merged. Switching it off gives the original model's output bit for bit, cheaply."""
        return self._root().state.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        state = self._root().state
        if value and not state.enabled:
            state.forget_choices()
        state.enabled = bool(value)

    def begin(self, num_steps: int) -> None:
        """Say that the next call of the denoiser begins a generation of `num_steps` steps.

        Needed where nothing else tells the number of steps: in a loop of your own over a denoiser, with a `window`.
        Inside a diffusers pipeline the steps are read from its scheduler. What you say holds until `reset`.
        """
        state = self._root().state
        state.steps.begin(num_steps)
        state.forget_choices()

    def step(self, index: int) -> None:
        """Say that the calls of the denoiser from now on belong to this step, from 0.

        Several calls in one step are passes over it: the two halves of guidance, tiles of a picture.
        """
        self._root().state.steps.tell(index)

    def compile(self, mode: str = "graphs", **options: Any) -> str:
        """Compile the denoiser with its merging. The next generation compiles, which takes seconds to minutes.

        Args:
            mode: `graphs` compiles the denoiser as a whole and captures it as CUDA graphs, one for each kind of step:
                the fastest, and the longest to compile. Where graphs cannot be used (no GPU, offloading, a block
                cache), it warns and takes `blocks`. `whole` compiles it as a whole. `blocks` compiles block by block:
                blocks of one kind share their code, which compiles in seconds.
            options: of `torch.compile`.

        Returns:
            The mode that was taken.

        Another size of image, or another number of steps, needs no new call: a new size is compiled when it comes,
        and a number of steps changes nothing. `remove` undoes it.
        """
        root = self._root()
        undo_compile(self.model)
        obstacle = root.graphs_obstacle(self.model) if mode == "graphs" else None
        blocks = root.compiled_blocks(self.model)
        taken = compile_denoiser(self.model, mode, blocks, obstacle, has_hooks=True, **options)
        root.is_compiled = True
        root.state.keeps_plans = taken == "graphs"
        return taken

    def reset(self) -> None:
        """Forget all choices, and the steps that you told: the next call of the denoiser begins a new generation.

        Rarely needed with a pipeline. The buffers stay where they are.
        """
        self._root().state.reset()

    def remove(self) -> None:
        """Take all hooks out. The model is what it was before, bit for bit."""
        root = self._root()
        if root.is_compiled:
            undo_compile(self.model)
        for placement in root.placements:
            _remove_hooks(placement.module, lambda hook: isinstance(hook, Hook))
        _remove_hooks(self.model, lambda hook: isinstance(hook, Hook))

    def summary(self) -> Summary:
        """What is merged, on which grids, how much it saves, and what is left alone and why. Print it."""
        root = self._root()
        return summarize(root.state, root.records)

    def __enter__(self) -> ToMAHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if find_root(self.model) is not None:
            self.remove()

    def __repr__(self) -> str:
        root = find_root(self.model)
        what = "removed" if root is None else f"ratio={root.state.config.ratio:g}, enabled={root.state.enabled}"
        return f"ToMAHandle({type(self.model).__name__}, {what})"

    def _root(self) -> RootHook:
        root = find_root(self.model)
        if root is None:
            raise RuntimeError("token merging was removed from this model: call apply_toma again for a new handle.")
        return root


def install(model: nn.Module, root: RootHook) -> ToMAHandle:
    """Register the hooks on the model and its modules."""
    prepare_compiler(_keep_root_out)
    for placement in [Placement(model, None, root), *root.placements]:
        placement.put()
    return ToMAHandle(model)


def _keep_root_out() -> None:
    RootHook.__call__ = torch.compiler.disable(RootHook.__call__)  # type: ignore[method-assign]


def find_root(model: nn.Module) -> RootHook | None:
    """The root hook of `model`, if tokens are merged in it."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RootHook)), None)


def _remove_hooks(module: nn.Module, chosen: Callable[[object], bool]) -> None:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if chosen(hook)]:
            del hooks[key]
            with_kwargs.pop(key, None)
