"""The hooks of this package: plain forward hooks of `torch.nn.Module`, which can be found again and removed.

They compose with whatever else wraps a module's forward (LoRA, offloading, caches, IP-Adapter, compilation). Each is an
object, so that copying a model copies its hooks and the state that they share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from toma_diffusion.engine.arguments import parameter_names


class Hook:
    """Marks the hooks of this package."""

    before = True
    """Whether it runs before the module (a forward pre-hook) or after it (a forward hook)."""
    names: tuple[str, ...] = ()
    """The parameters of the module that it is a hook of."""

    def bind(self, module: nn.Module) -> None:
        """Learn the parameters of the module. Called before the hook is put in."""
        self.names = parameter_names(module)


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


def remove_hooks(module: nn.Module, chosen: Callable[[object], bool]) -> None:
    """Take the chosen forward hooks of a module out, without a trace."""
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if chosen(hook)]:
            del hooks[key]
            with_kwargs.pop(key, None)
