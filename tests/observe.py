"""Ways to see what a model really does, from below its Python."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from toma_diffusion.engine.hooks import Hook
from toma_diffusion.engine.install import find_root
from toma_diffusion.merge import MergePlan
from toma_diffusion.merge.state import MergeState

BLOCKS = (
    "BasicTransformerBlock",
    "FluxTransformerBlock",
    "FluxSingleTransformerBlock",
    "JointTransformerBlock",
    "Flux2TransformerBlock",
    "Flux2SingleTransformerBlock",
    "Flux3ModeTransformerBlock",
    "Flux3SingleTransformerBlock",
    "QwenImageTransformerBlock",
    "QwenImage21TransformerBlock",
    "ZImageTransformerBlock",
    "Krea2TransformerBlock",
    "ChromaTransformerBlock",
    "ChromaSingleTransformerBlock",
    "AuraFlowJointTransformerBlock",
    "AuraFlowSingleTransformerBlock",
)
"""The transformer blocks of all families."""
TOLERANCE = 1e-3
"""Absolute and relative, see `same_picture`."""


class AttentionLengths(TorchFunctionMode):
    """The (query, key) lengths of every call of scaled_dot_product_attention."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            values = [*args, *(kwargs or {}).values()]
            self.seen.append((values[0].shape[-2], values[1].shape[-2]))
        return func(*args, **(kwargs or {}))


@contextmanager
def watch_plans(tell):
    """Have `tell` called with "merge" or "unmerge" whenever a plan does that."""

    def told(name):
        method = getattr(MergePlan, name)

        def call(plan, *args, **kwargs):
            tell(name)
            return method(plan, *args, **kwargs)

        return call

    with patch.multiple(MergePlan, merge=told("merge"), unmerge=told("unmerge")):
        yield


class CountOperators(TorchDispatchMode):
    """How often each of the package's operators runs, and how often a plan merges and unmerges."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._plans = watch_plans(lambda name: self.calls.update([name]))

    def __enter__(self):
        self._plans.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        self._plans.__exit__(*error)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "toma_diffusion":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def attention_lengths(call) -> list[tuple[int, int]]:
    with AttentionLengths() as lengths:
        call()
    return lengths.seen


def our_hooks(model: nn.Module) -> list[Hook]:
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
        if isinstance(hook, Hook)
    ]


def bookkeeping(model: nn.Module) -> list[dict]:
    """All hook dictionaries of all modules."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return [dict(getattr(module, name)) for module in model.modules() for name in names]


def state_of(model: nn.Module) -> MergeState:
    return find_root(model).inside


def inputs_of(module: nn.Module, call) -> list[tuple[tuple, dict]]:
    """The arguments with which `module` is really run, after all other pre-hooks."""
    seen = []
    handle = module.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    try:
        with torch.no_grad():
            call()
    finally:
        handle.remove()
    return seen


def same_picture(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that two outputs differ by rounding alone.

    Bit for bit only what is switched off or removed is promised. Two other passes may round otherwise: peft asks for
    gradients of the adapter it switches to, and torch then takes another kernel for the same product. So it may for
    another batch, or for weights at another address.

    The tolerance stands between the two things it has to tell apart: on the tiny models with fixed destinations
    (`merging.steady`), moving every weight by its last bit moves outputs by 5e-6 at most; merging moves some value by
    0.07 or more.

    Never compare models that choose greedily: two tokens that cover none but each other gain exactly the same, whatever
    the precision, and the last bit decides between them. That is every tenth pick at ratio 0.5, and moves outputs by up
    to 0.05. ToMeSD and ToFu have no such ties; in float64 their matches are always the same.
    """
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


class Graphs:
    """A backend that counts what it is given, and runs it as it stands or through torch's autograd compiler."""

    def __init__(self, backend: str = "eager"):
        self.count = 0
        self.backend = backend

    def __call__(self, graph, inputs):
        self.count += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def compile_blocks(model: nn.Module, **options) -> None:
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            module.compile(**options)
