"""What each call of a denoiser does: its operators, its step, and whether it merges."""

from __future__ import annotations

from collections import Counter

import torch
from observe import state_of, watch_plans
from tiny_pipelines import denoiser, run
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "item")
"""Operators that read a value back from the device."""
SELECTS, WEIGHS = "facility_location", "merge_weights"


class Trace(TorchDispatchMode):
    """Counts the operators that run below every layer of Python, for each call of some denoisers by itself."""

    def __init__(self, *pipes_or_models):
        super().__init__()
        self.models = [each if isinstance(each, torch.nn.Module) else denoiser(each) for each in pipes_or_models]
        self.calls: list[Counter] = []
        self.steps: list[tuple[int, int]] = []
        """(step, pass over it) of every call."""
        self.merged: list[bool] = []
        self.model_of: list[int] = []
        self.running = False

    def __enter__(self):
        self.hooks = [
            hook
            for number, model in enumerate(self.models)
            for hook in (
                model.register_forward_pre_hook(lambda *_: self._begin(), prepend=True),
                model.register_forward_hook(lambda model, *_, number=number: self._end(model, number)),
            )
        ]
        self.plans = watch_plans(lambda name: self.calls[-1].update([name]))
        self.plans.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        self.plans.__exit__(*error)
        return super().__exit__(*error)

    def _begin(self):
        self.calls.append(Counter())
        self.running = True

    def _end(self, model, number):
        self.running = False
        self.model_of.append(number)
        if any(hook for hook in model._forward_pre_hooks.values() if type(hook).__name__ == "RootHook"):
            tick = state_of(model).session._last
            self.steps.append((tick.step, tick.pass_index))
            self.merged.append(state_of(model).active)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.running:
            self.calls[-1][func._opname] += 1
            if func._opname in ("index", "index_put_") and any(
                index is not None and index.dtype == torch.bool for index in args[1]
            ):
                self.calls[-1]["nonzero"] += 1
        return func(*args, **(kwargs or {}))

    def total(self, operator: str) -> int:
        return sum(call[operator] for call in self.calls)

    def where(self, operator: str) -> list[int]:
        """The calls in which it ran."""
        return [index for index, call in enumerate(self.calls) if call[operator]]

    @property
    def reads(self) -> list[dict[str, int]]:
        """How often each call reads a value back."""
        return [{name: call[name] for name in READS} for call in self.calls]


def traced(pipe, **arguments) -> Trace:
    """Of one generation."""
    with Trace(pipe) as trace:
        run(pipe, **arguments)
    return trace
