"""The methods, one per file: ToMA, and ToMeSD, ToFu and ToDo to compare it with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from toma_diffusion.checks import check_one_of
from toma_diffusion.errors import UsageError
from toma_diffusion.merge.base import Config
from toma_diffusion.merge.config import PRESETS, ToMAConfig
from toma_diffusion.merge.place import ToMA
from toma_diffusion.others.base import Method, PerBlockMethod
from toma_diffusion.others.todo import ToDo
from toma_diffusion.others.tofu import ToFu
from toma_diffusion.others.tomesd import ToMeSD

__all__ = [
    "METHODS",
    "Method",
    "PerBlockMethod",
    "config_class",
    "defaults_that_count",
    "method_of",
    "named_config",
    "register_method",
    "resolve_config",
]

_METHODS: list[Method[Any]] = [ToMA(), ToMeSD(), ToFu(), ToDo()]
_SETTINGS: dict[str, type[Config]] = {
    method.name: method.config_class for method in _METHODS if not isinstance(method, ToMA)
}
METHODS: Mapping[str, type[Config]] = MappingProxyType(_SETTINGS)
"""The settings of the other methods, by the name of the method."""


def register_method(method: type[Method[Any]]) -> type[Method[Any]]:
    """Add a method; usable as a class decorator. Then `apply_toma` and all commands know its name.

    See docs/add-a-method.md.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise UsageError(f"{method!r} is not a subclass of toma_diffusion.others.Method.")
    name, settings = getattr(method, "name", None), getattr(method, "config_class", None)
    if name is None or settings is None:
        raise UsageError(f"{method.__name__} needs a name and a config_class: set both in the class.")
    if name in (ToMA.name, *METHODS, *PRESETS):
        raise UsageError(f"there is a method or preset with the name {name!r} already: choose another one.")
    if any(settings is known.config_class for known in _METHODS):
        raise UsageError(
            f"{settings.__name__} is the config_class of another method, which would run in its place: give "
            f"{method.__name__} a class of its own."
        )
    made = method()
    _METHODS.append(made)
    _SETTINGS[name] = settings
    return method


def method_of(config: Config) -> Method[Any]:
    """The method that a configuration is for."""
    for method in _METHODS:
        if type(config) is method.config_class:
            return method
    raise UsageError(f"{type(config).__name__} belongs to no method: use the settings of one of {_names()}.")


def config_class(name: str) -> type[Config]:
    """The settings of a preset of ToMA, or of another method."""
    return METHODS.get(name, ToMAConfig)


def named_config(name: str, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a preset of ToMA, or of another method, with single fields replaced."""
    if name in METHODS:
        return METHODS[name].from_dict(overrides)
    if name not in PRESETS:
        ToMAConfig.check_not_a_bound(name)
        check_one_of("preset", name, (*PRESETS, *METHODS))
    return ToMAConfig.from_preset(name, **overrides)


def resolve_config(given: Config | str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """The settings that `apply_toma` uses.

    Args:
        given: a configuration, used as it is; or the name of a preset or method; or None for `ToMAConfig()`.
        overrides: fields to replace.
        defaults: of the model family, for fields that the user did not set.
    """
    if isinstance(given, Config):
        return type(given).from_dict(given.to_dict() | dict(overrides))
    fields = {**defaults_that_count(given, overrides, defaults), **overrides}
    if given is None:
        return ToMAConfig.from_dict(fields)
    if isinstance(given, str):
        return named_config(given, fields)
    raise UsageError(
        f"{given!r} is not a configuration: pass a ToMAConfig, the name of a preset, or nothing; for another method "
        f"its name, one of {', '.join(METHODS)}, or its configuration."
    )


def defaults_that_count(
    given: Config | str | None, overrides: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The defaults of the model family for fields that the method has and that the user did not set."""
    if isinstance(given, Config):
        return {}
    known = config_class(given) if isinstance(given, str) else ToMAConfig
    return {name: value for name, value in defaults.items() if known.knows(name) and name not in overrides}


def _names() -> str:
    return ", ".join(method.name for method in _METHODS)
