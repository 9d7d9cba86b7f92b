"""Other methods than ToMA, one a file: settings, plan and placement together. And the registry of all methods."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.config import Merge
from toma_diffusion.merge.method import Method
from toma_diffusion.merge.place import ToMA
from toma_diffusion.merge.variants import VARIANTS
from toma_diffusion.others.base import PerBlockMethod
from toma_diffusion.others.todo import ToDo, ToDoMethod
from toma_diffusion.others.tofu import ToFu, ToFuMethod
from toma_diffusion.others.tomesd import ToMeSD, ToMeSDMethod

__all__ = [
    "METHODS",
    "Method",
    "PerBlockMethod",
    "ToDo",
    "ToFu",
    "ToMeSD",
    "method_of",
    "register_method",
    "settings_class",
]

_METHODS: list[Method[Any]] = [ToMA(), ToMeSDMethod(), ToFuMethod(), ToDoMethod()]
_SETTINGS: dict[str, type[Merging]] = {
    method.name: method.config_class for method in _METHODS if not isinstance(method, ToMA)
}
METHODS: Mapping[str, type[Merging]] = MappingProxyType(_SETTINGS)
"""The settings of the other methods, by the name of the method."""


def register_method(method: type[Method[Any]]) -> type[Method[Any]]:
    """Add a method; usable as a class decorator. Then `speed_up(pipe, merge=…)` and all commands know it.

    See docs/add-a-method.md.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UsageError(f"{method!r} is not a subclass of toma_diffusion.others.Method.")
    name, settings = getattr(method, "name", None), getattr(method, "config_class", None)
    if name is None or settings is None:
        raise UsageError(f"{method.__name__} needs a name and a config_class: set both in the class.")
    if name in (ToMA.name, *METHODS, *VARIANTS):
        raise UsageError(f"there is a method or variant with the name {name!r} already: choose another one.")
    if any(settings is known.config_class for known in _METHODS):
        raise UsageError(
            f"{settings.__name__} is the config_class of another method, which would run in its place: give "
            f"{method.__name__} a class of its own."
        )
    _METHODS.append(method())
    _SETTINGS[name] = settings
    return method


def method_of(config: Merging) -> Method[Any]:
    """The method that a configuration is for."""
    for method in _METHODS:
        if type(config) is method.config_class:
            return method
    names = ", ".join(method.name for method in _METHODS)
    raise UsageError(f"{type(config).__name__} belongs to no method: use the settings of one of {names}.")


def settings_class(name: str) -> type[Merging]:
    """The settings of ToMA, or of another method by its name."""
    return Merge if name == ToMA.name else METHODS[name]
