"""The arguments of a call, by the names of the parameters, however they were passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Given:
    """The arguments with which a module is called.

    `given["temb"]` is an argument by its name, or None if it was not passed; `given["outer.inner"]` is an entry of a
    dictionary. Plain Python that torch.compile can trace.
    """

    def __init__(self, names: tuple[str, ...], args: Arguments, kwargs: Keywords) -> None:
        self.names = names
        """Of the module's parameters, in their order. Looked at only for arguments that were passed by position."""
        self.args = args
        self.kwargs = kwargs

    def __getitem__(self, name: str) -> Any:
        outer, _, inner = name.rpartition(".")
        if outer:
            return (self[outer] or {}).get(inner)
        if name in self.kwargs:
            return self.kwargs[name]
        if not self.args or name not in self.names:
            return None
        index = self.names.index(name)
        return self.args[index] if index < len(self.args) else None

    @property
    def tokens(self) -> Tensor:
        tokens: Tensor = self.args[0] if self.args else self.kwargs[self._first]
        return tokens

    def with_tokens(self, tokens: Tensor) -> Given:
        if self.args:
            return Given(self.names, (tokens, *self.args[1:]), self.kwargs)
        return Given(self.names, self.args, {**self.kwargs, self._first: tokens})

    def with_argument(self, name: str, value: Any) -> Given:
        """The same with another value for one argument, passed as it was before; by name if it was not passed."""
        outer, _, inner = name.rpartition(".")
        if outer:
            return self.with_argument(outer, {**(self[outer] or {}), inner: value})
        index = self.names.index(name) if name not in self.kwargs and name in self.names else len(self.args)
        if index < len(self.args):
            return Given(self.names, (*self.args[:index], value, *self.args[index + 1 :]), self.kwargs)
        return Given(self.names, self.args, {**self.kwargs, name: value})

    @property
    def _first(self) -> str:
        return "hidden_states" if "hidden_states" in self.kwargs else self.names[0]


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a module's forward. Those of its class: an instance may have a wrapper without names."""
    return _names_of(type(module).forward)


def given_to(module: nn.Module, args: Arguments, kwargs: Keywords) -> Given:
    """The arguments of a call of that module."""
    return Given(parameter_names(module), args, kwargs)


@lru_cache(maxsize=256)
def _names_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]
