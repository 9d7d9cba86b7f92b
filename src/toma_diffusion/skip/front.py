"""What stands in front of a module's call. It decides whether the module runs."""

from __future__ import annotations

from typing import Any

from torch import nn

CALL = "_compiled_call_impl"
"""What `nn.Module.__call__` calls in place of its own, if it is set. Never copied or pickled with a module."""


class Front:
    """Is called in the place of everything else: in front of hooks, of offloading, and of `torch.compile`."""

    model: nn.Module
    inner: Any = None
    """What was called before; None: the model's own call."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model calls it."""
        return vars(self.model).get(CALL) is self

    def put(self) -> None:
        """Take the place of the model's call, also if something else has taken it since."""
        if not self.is_in_place:
            self.inner = vars(self.model).get(CALL)
            setattr(self.model, CALL, self)

    def take_out(self) -> None:
        """Put back what was there before."""
        if self.is_in_place:
            delattr(self.model, CALL)
            if self.inner is not None:
                setattr(self.model, CALL, self.inner)
        self.inner = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was called before."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return self.model._call_impl(*args, **kwargs)
