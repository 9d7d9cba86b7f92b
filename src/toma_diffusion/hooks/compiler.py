"""Compiling a denoiser, with merged tokens or without: block by block, whole, or whole and captured as CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.sites import Arguments, Hook, Keywords

MODES = ("blocks", "whole", "graphs")
GRAPHS_PER_BLOCK_CLASS = 256
"""How many variants torch.compile may make of one block's code. A setting needs up to eight; those of settings no
longer in use stay in memory, in case they come back."""


@dataclass(eq=False)
class BeginReplay(Hook):
    """Forward pre-hook of a captured denoiser: what the last call returned may be overwritten from now on."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Tell torch before every call."""
        torch.compiler.cudagraph_mark_step_begin()


@dataclass(eq=False)
class KeepOutput(Hook):
    """Forward hook of a captured denoiser: a replay writes its output where the last one did, so it is copied out."""

    before = False

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """Copy after every call: a few hundred KiB."""
        from torch.utils import _pytree

        return _pytree.tree_map_only(Tensor, torch.clone, output)


@cache
def prepare_compiler(keep_out: Callable[[], None]) -> None:
    """Keep the root hook out of graphs, leave room for the graphs of the merged blocks, and have hooks looked at.

    Done at the first install, not at import: it imports torch's compiler and triton, which takes seconds.

    Args:
        keep_out: marks what must not be part of any graph.
    """
    import torch._dynamo

    keep_out()
    # Compiled block by block, every kind of block needs up to three graphs for the first of its kind, one for the
    # others, and one outside the window. Stable Diffusion 1.5 has four kinds; torch gives up at 8 graphs by default.
    torch._dynamo.config.recompile_limit = max(GRAPHS_PER_BLOCK_CLASS, torch._dynamo.config.recompile_limit)
    # By default code compiled for a module without hooks is used for one that has them: a block left alone would lend
    # its code to the merged ones, and an unmerged model of the same class to the whole merged model. What is compiled
    # from now on looks whether there are hooks; what was compiled before does not, and must go.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch.compiler.reset()


def compile_denoiser(
    model: nn.Module,
    mode: str,
    blocks: Iterable[nn.Module],
    obstacle: str | None = None,
    *,
    has_hooks: bool = False,
    **options: Any,
) -> str:
    """Have a denoiser compiled at its next calls. Returns the mode that was taken.

    Args:
        mode: `blocks`, `whole` or `graphs`.
        blocks: what is compiled block by block.
        obstacle: why the denoiser cannot be captured as CUDA graphs, if so. `blocks` is taken then, with a warning.
        has_hooks: whether tokens are merged in it.
        options: of `torch.compile`.
    """
    if mode not in MODES:
        raise UsageError(f"mode={mode!r} is not known: use one of {', '.join(map(repr, MODES))}.")
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(GRAPHS_PER_BLOCK_CLASS, torch._dynamo.config.recompile_limit)
    _keep_hooks_out()
    obstacle = obstacle or _no_graphs(model)
    if mode == "graphs" and obstacle is not None:
        warnings.warn(f"CUDA graphs cannot be used here: {obstacle}. Compiling block by block instead.", stacklevel=3)
        mode = "blocks"
    if mode == "graphs":
        model.register_forward_pre_hook(BeginReplay(), with_kwargs=True)
        model.register_forward_hook(KeepOutput(), with_kwargs=True)
    settings = dict(options.pop("options", None) or {})
    if mode == "graphs":
        settings = {"triton.cudagraphs": True} | settings  # what torch's mode "reduce-overhead" sets
    if mode != "blocks" and has_hooks:
        settings = {"guard_filter_fn": _without_hook_guards} | settings
    for module in list(blocks) if mode == "blocks" else [model]:
        module.compile(**{"fullgraph": True, "dynamic": False} | options, options=dict(settings) or None)
    return mode


def _without_hook_guards(guards: Sequence[Any]) -> list[bool]:
    """Which of the conditions of compiled code are checked at every call: all but that modules without hooks have none.

    SDXL has ten thousand of the latter, and to check them takes a third of the CPU time of a call. What was compiled
    for a whole merged model cannot be taken for another without them: it also asks for the very hooks that merge.
    """
    return [guard.guard_type != "EMPTY_NN_MODULE_HOOKS_DICT" for guard in guards]


def undo_compile(model: nn.Module) -> None:
    """Run the model as it was before `compile_denoiser`."""
    for module in model.modules():
        module._compiled_call_impl = None
    for hooks, with_kwargs in (
        (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
        (model._forward_hooks, model._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if isinstance(hook, (BeginReplay, KeepOutput))]:
            del hooks[key]
            with_kwargs.pop(key, None)


@cache
def _keep_hooks_out() -> None:
    """Hooks of the whole model are called from compiled code, which would make graphs of them too."""
    for hook in (BeginReplay, KeepOutput):
        hook.__call__ = torch.compiler.disable(hook.__call__)  # type: ignore[method-assign]


def _no_graphs(model: nn.Module) -> str | None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cuda"}:
        return f"they need a model on a CUDA device, and this one is on {', '.join(sorted(devices)) or 'none'}"
    return None
