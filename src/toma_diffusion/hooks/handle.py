"""Installs hooks in a model and removes them again; the handle that `apply_toma` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.arguments import Arguments, Given, Keywords
from toma_diffusion.hooks.compiler import compile_denoiser, prepare_compiler, undo_compile
from toma_diffusion.hooks.reuse import StandIn
from toma_diffusion.hooks.sites import Hook, remove_hooks
from toma_diffusion.hooks.state import Call, MergeState
from toma_diffusion.hooks.summary import BlockRecord, Summary, summarize


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


@dataclass(eq=False)
class Replacement(Placement):
    """A `forward` of a module that takes the place of its own."""

    def __init__(self, module: nn.Module, stand_in: StandIn) -> None:
        super().__init__(module, None, Hook())
        self.stand_in = stand_in

    def put(self) -> None:
        """Replace it."""
        self.stand_in.put()

    def follow(self) -> None:
        """Replace it again if something has put the module's own one back."""
        if self.stand_in.is_out:
            self.stand_in.put()

    def take_out(self) -> None:
        """Put the module's own one back."""
        self.stand_in.take_out()


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
    is_compiled: bool = False
    """Whether `handle.compile` was called, so that `remove` must undo it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        prepare_compiler(_keep_root_out)  # a pickled model may be loaded in a process that has not merged anything yet

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Forward pre-hook of the denoiser."""
        if self.state.enabled:
            self.check(module)
        for placement in self.placements:
            placement.follow()
        try:
            call = self.read_call(module, Given(self.names, args, kwargs))
        except UsageError:  # inputs that cannot be merged
            if self.state.enabled:
                raise
            self.state.leave_alone()
        else:
            self.state.begin_call(module, call)


class ToMAHandle:
    """What makes a denoiser faster, or all of a pipeline: inspect it, switch it off and on, compile it, remove it.

    As a context manager it removes all of it at the end of the `with` block. All state is in the hooks of the models; a
    handle holds nothing but them.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.models = models

    @property
    def model(self) -> nn.Module:
        """The denoiser; the first if there are several."""
        return self.models[0]

    @property
    def enabled(self) -> bool:
        """Whether it does anything. If False, the output is that of the original model, bit for bit."""
        return all(root.state.enabled for root in self._roots().values())

    @enabled.setter
    def enabled(self, value: bool) -> None:
        for root in self._roots().values():
            if value and not root.state.enabled:
                root.state.forget_choices()
            root.state.enabled = bool(value)

    def begin(self, num_steps: int) -> None:
        """Set the number of steps of the generation that begins with the next call of the denoiser.

        A `window` needs it in a loop without a pipeline. Inside a diffusers pipeline, steps are read from its
        scheduler. Valid until `reset`.
        """
        for root in self._roots().values():
            root.state.steps.begin(num_steps)
            root.state.forget_choices()

    def step(self, index: int, ordinal: int | None = None, parts: int | None = None) -> None:
        """Set the step, counted from 0, that the following calls of the denoiser belong to.

        Several calls in one step are passes over it, such as the two halves of classifier-free guidance, or the tiles
        of a large image.

        Args:
            index: of the step.
            ordinal: which pass over the step the next call is, if passes do not always come in the same order. Call
                this before every pass then. What is kept from step to step is kept for every ordinal.
            parts: of how many parts the batch consists that are the same pictures with other prompts, if that is known.
        """
        for steps in {id(root.state.steps): root.state.steps for root in self._roots().values()}.values():
            steps.set_step(index, ordinal, parts)

    def compile(self, mode: str = "graphs", **options: Any) -> str:
        """Compile the denoiser with its merging. The next generation compiles, which takes seconds to minutes.

        Args:
            mode: `graphs` compiles the whole denoiser and captures it as CUDA graphs, one for each kind of step. This
                is the fastest, and takes longest to compile. Where CUDA graphs are not possible (no GPU, offloading, a
                block cache), it warns and uses `blocks`. `whole` compiles the whole denoiser without CUDA graphs.
                `blocks` compiles block by block; blocks of one kind share their code, so this is quick.
            options: passed to `torch.compile`.

        Returns:
            The mode that is used.

        Call it once. A new image size is compiled when it first comes, the number of steps may change freely. `remove`
        undoes it. See docs/compile.md.
        """
        roots = self._roots()
        if mode == "graphs" and any(root.graphs_obstacle(model) for model, root in roots.items()):
            # All denoisers of a pipeline in one mode. The first that has an obstacle is asked first: it warns.
            roots = dict(sorted(roots.items(), key=lambda item: item[1].graphs_obstacle(item[0]) is None))
        taken = mode
        for model, root in roots.items():
            undo_compile(model)
            obstacle = root.graphs_obstacle(model) if taken == "graphs" else None
            blocks = root.compiled_blocks(model)
            taken = compile_denoiser(model, taken, blocks, obstacle, has_hooks=True, **options)
            root.is_compiled = True
            root.state.keeps_plans = taken == "graphs"
        return taken

    def reset(self) -> None:
        """Forget all choices, and what `begin` and `step` have set. The next call begins a new generation.

        Rarely needed with a pipeline. Buffers are kept.
        """
        for root in self._roots().values():
            root.state.reset()

    def remove(self) -> None:
        """Remove all hooks, and undo `compile`. The model is what it was before, bit for bit."""
        for model, root in self._roots().items():
            if root.is_compiled:
                undo_compile(model)
            for placement in root.placements:
                placement.take_out()
            remove_hooks(model, lambda hook: isinstance(hook, Hook))

    def summary(self) -> Summary:
        """What is merged, on which grids, how much it saves, and what is not merged and why. Print it.

        If there are several denoisers, it is that of the first, and has the summaries of the others in `others`.
        """
        first, *others = (summarize(root.state, root.records) for root in self._roots().values())
        return replace(first, others=tuple(others))

    def __enter__(self) -> ToMAHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if any(find_root(model) is not None for model in self.models):
            self.remove()

    def __repr__(self) -> str:
        root = next((root for model in self.models if (root := find_root(model)) is not None), None)
        what = "removed" if root is None else f"ratio={root.state.config.ratio:g}, enabled={root.state.enabled}"
        return f"ToMAHandle({', '.join(type(model).__name__ for model in self.models)}, {what})"

    def _roots(self) -> dict[nn.Module, RootHook]:
        """Of the denoisers from which it was not removed."""
        roots = {model: root for model in self.models if (root := find_root(model)) is not None}
        if not roots:
            raise RuntimeError("this handle was removed from its model: call apply_toma again for a new one.")
        return roots


def install(roots: Mapping[nn.Module, RootHook]) -> ToMAHandle:
    """Register the hooks of every model and its modules."""
    prepare_compiler(_keep_root_out)
    for model, root in roots.items():
        for placement in [Placement(model, None, root), *root.placements]:
            placement.put()
    return ToMAHandle(*roots)


def _keep_root_out() -> None:
    RootHook.__call__ = torch.compiler.disable(RootHook.__call__)  # type: ignore[method-assign]


def find_root(model: nn.Module) -> RootHook | None:
    """The root hook of `model`, if tokens are merged in it."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, RootHook)), None)
