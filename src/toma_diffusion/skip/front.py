"""What stands in front of a module's call. It decides whether the module runs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toma_diffusion.engine.compile import CALL, skip_frames


class Front:
    """Is called in the place of everything else: in front of hooks, of offloading, and of `torch.compile`.

    It is false unless something compiled is behind it: peft looks at `_compiled_call_impl` to find that out.
    """

    inner: Any = None
    """What was called before; None: the model's own call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # the model keeps this alive: deleted, it must free its memory at once
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """What `torch.compile(model)` returned."""
        self.is_inside = False
        """Whether a call of such a one is running, for which it has decided already."""

    def __bool__(self) -> bool:
        return self.inner is not None

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def is_in_place(self) -> bool:
        return vars(self.model).get(CALL) is self

    def put(self) -> None:
        """Take the place of the model's call, also if something else has taken it since."""
        if not self.is_in_place:
            self.inner = vars(self.model).get(CALL)
            setattr(self.model, CALL, self)

    def take_out(self) -> None:
        if self.is_in_place:
            delattr(self.model, CALL)
            if self.inner is not None:
                setattr(self.model, CALL, self.inner)
        self.inner = None
        for compiled in self._compiled:
            vars(compiled).pop(CALL, None)
        self._compiled.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Never part of a compiled graph; what it calls may be one."""
        if self.is_inside:
            return self.run(*args, **kwargs)
        self.put_around()
        return self.answer(self.run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return self.model._call_impl(*args, **kwargs)

    def answer(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns. `run` runs the model."""
        raise NotImplementedError

    def put_around(self) -> None:
        """Stand in front of `torch.compile(model)` too, if the call comes from there: from the next call on."""
        compiled = compiled_around(self.model)
        if compiled is not None:
            self._compiled.add(compiled)
            vars(compiled)[CALL] = CompiledFront(self, compiled)


class CompiledFront:
    """Stands in front of what `torch.compile(model)` returned.

    In front of the model alone would not do: with `fullgraph=True` torch raises if it enters nothing that is compiled.
    """

    def __init__(self, front: Front, compiled: nn.Module) -> None:
        self.front = front
        self._compiled = weakref.ref(compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.front.answer(self.run, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled()
        assert compiled is not None
        self.front.is_inside = True
        try:
            return compiled._call_impl(*args, **kwargs)
        finally:
            self.front.is_inside = False


def compiled_around(model: nn.Module) -> nn.Module | None:
    """What `torch.compile(model)` returned, if the call on Python's stack comes from there."""
    from torch._dynamo.eval_frame import OptimizedModule

    entrance = OptimizedModule.__call__.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is entrance and frame.f_locals["self"]._orig_mod is model:
            compiled: nn.Module = frame.f_locals["self"]
            return compiled
        frame = frame.f_back  # type: ignore[assignment]
    return None


def keep_out_of_graphs() -> None:
    """Exclude these calls from graphs, but not what they run."""
    Front.put_around = torch.compiler.disable(Front.put_around)  # type: ignore[method-assign]
    skip_frames(Front.__call__, Front.run, CompiledFront.__call__, CompiledFront.run)
