"""Compiles a denoiser, merged or not: block by block, as a whole, or as a whole with CUDA graphs."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from toma_diffusion.checks import check_one_of
from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Arguments, Keywords
from toma_diffusion.engine.hooks import Hook, remove_hooks
from toma_diffusion.errors import UsageError

MODES = ("blocks", "whole", "graphs")
CALL = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in place of its own, if it is set. Never copied or pickled with a module."""
SETTINGS = ("recompile_limit", "skip_nnmodule_hook_guards")
"""Of torch's compiler, which are changed as long as a model is made faster."""
IF_EXPORT = "if this is an export: call handle.remove() first"
"""What torch says when it meets our calls where everything must be one graph."""
GRAPHS_PER_BLOCK_CLASS = 256
"""How many variants of one block's code torch.compile may make. A setting needs up to eight; variants of earlier
settings stay in memory."""


@dataclass(eq=False)
class BeginReplay(Hook):
    """Forward pre-hook of a captured denoiser: marks the beginning of a call for CUDA graphs."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """From here on torch may overwrite the output of the last call."""
        torch.compiler.cudagraph_mark_step_begin()


@dataclass(eq=False)
class KeepOutput(Hook):
    """Forward hook of a captured denoiser: copies the output, because the next replay writes to the same memory.

    It has a few hundred KiB.
    """

    before = False

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        return _pytree.tree_map_only(Tensor, torch.clone, output)


_holders: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those for whom the settings of torch's compiler are changed."""
_settings_before: dict[str, Any] = {}


def hold_compiler(holder: Any, keep_out: Callable[[], None]) -> None:
    """Set torch.compile up for models with hooks: raise its limit of variants, and make it check hooks.

    Done when a model is first made faster, not at import, because importing torch's compiler takes seconds. When the
    last holder releases it, the settings are what they were before.

    Args:
        holder: needs it until it calls `release_compiler`, or is no more.
        keep_out: marks the functions that must not be part of any graph.
    """
    import torch._dynamo

    _once(keep_out)
    config = torch._dynamo.config
    if not _settings_before:
        _settings_before.update({name: getattr(config, name) for name in SETTINGS})
        # By default torch.compile does not check hooks: code compiled for a block that is not merged would be used for
        # merged ones, and that of an unmerged model for a merged model of the same class. What is compiled from now on
        # checks them; what was compiled before does not, and is compiled again at its next call.
        if upstream.has_compiled_anything():
            torch.compiler.reset()
    # Compiled block by block, every kind of block needs up to three graphs for the first of its kind, one for the
    # others, and one outside the window. Stable Diffusion 1.5 has four kinds; torch gives up at 8 graphs by default.
    config.recompile_limit = max(GRAPHS_PER_BLOCK_CLASS, config.recompile_limit)
    config.skip_nnmodule_hook_guards = False
    if holder not in _holders:
        _holders.add(holder)
        weakref.finalize(holder, _put_settings_back).atexit = False


def release_compiler(holder: Any) -> None:
    """Put the settings of torch's compiler back if nobody else holds it."""
    _holders.discard(holder)
    _put_settings_back()


def _put_settings_back() -> None:
    if _settings_before and next(iter(_holders), None) is None:  # its length would count one that is just being deleted
        import torch._dynamo

        for name, value in _settings_before.items():
            setattr(torch._dynamo.config, name, value)
        _settings_before.clear()


@cache
def _once(function: Callable[[], None]) -> None:
    function()


def skip_frames(*functions: Callable[..., Any]) -> None:
    """Exclude functions from graphs, but not what they call, also where a graph would begin with them.

    `torch.compiler.disable(recursive=False)` does less: the function is not inlined, but a graph may begin with it.
    """
    from torch._dynamo.decorators import skip

    for function in functions:
        skip(function)
        function._torchdynamo_disable_msg = IF_EXPORT  # type: ignore[attr-defined]


@dataclass(eq=False)
class Compiled:
    """What `compile_denoiser` did."""

    mode: str
    """`blocks`, `whole` or `graphs`."""
    before: list[tuple[weakref.ref[nn.Module], Any]]
    """The modules that were compiled, and what the user had compiled of them before."""

    def undo(self, model: nn.Module) -> None:
        for reference, call in self.before:
            module = reference()
            if module is None:
                continue
            if call is None:
                vars(module).pop(CALL, None)
            else:
                setattr(module, CALL, call)
        remove_hooks(model, lambda hook: isinstance(hook, (BeginReplay, KeepOutput)))


def compile_denoiser(
    model: nn.Module,
    mode: str,
    blocks: Iterable[nn.Module],
    obstacle: str | None = None,
    *,
    has_hooks: bool = False,
    **options: Any,
) -> Compiled:
    """Compile a denoiser at its next calls.

    Args:
        mode: `blocks`, `whole` or `graphs`.
        blocks: the modules to compile one by one in mode `blocks`.
        obstacle: the reason why CUDA graphs are not possible, if any. Then `blocks` is used, with a warning.
        has_hooks: whether tokens are merged in it.
        options: passed to `torch.compile`.
    """
    check_one_of("mode", mode, MODES)
    _once(_keep_hooks_out)
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
    modules = list(blocks) if mode == "blocks" else [model]
    if not modules:
        raise UsageError(f"the blocks of this {type(model).__name__} are not known: compile it with mode='whole'.")
    before = [(weakref.ref(module), vars(module).get(CALL)) for module in modules]
    for module in modules:
        module.compile(**{"fullgraph": True, "dynamic": False} | options, options=dict(settings) or None)
    return Compiled(mode, before)


def _without_hook_guards(guards: Sequence[Any]) -> list[bool]:
    """The guards to keep: all but those that say that a module has no hooks.

    SDXL has ten thousand of those, and they take a third of the CPU time of a call. They are not needed here: code that
    was compiled for a whole merged model also has guards on the hooks that merge, so no other model can use it.
    """
    return [guard.guard_type != "EMPTY_NN_MODULE_HOOKS_DICT" for guard in guards]


def _keep_hooks_out() -> None:
    """Exclude these two hooks from graphs: hooks of the whole model are called from compiled code."""
    for hook in (BeginReplay, KeepOutput):
        hook.__call__ = torch.compiler.disable(hook.__call__)  # type: ignore[method-assign]


def _no_graphs(model: nn.Module) -> str | None:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cuda"}:
        return f"they need a model on a CUDA device, and this one is on {', '.join(sorted(devices)) or 'none'}"
    return None
