"""ControlNets do not run in skipped steps either. Pipelines call them just before the denoiser.

What they return goes into the denoiser alone, which does not run. So it does not matter what that is, as long as it has
the right structure: they return their last output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from toma_diffusion.engine.arguments import given_to
from toma_diffusion.engine.clock import Identity
from toma_diffusion.engine.compile import CALL, skip_frames
from toma_diffusion.skip.front import Front
from toma_diffusion.skip.history import Seen

if TYPE_CHECKING:
    from toma_diffusion.skip.denoiser import Skipper


class ControlCall(Front):
    """The call of one ControlNet."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.skippers: weakref.WeakSet[Skipper] = weakref.WeakSet()
        """Of the denoisers that it controls. It keeps none of them alive."""
        self.last: Any = None
        """What it returned last."""
        self.passes: dict[tuple[Any, ...], list[Identity]] = {}
        """The conditionings that it was called with, by the shapes of samples."""

    def answer(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = self.seen(args, kwargs)
        if self.is_skipped(seen):
            return self.last
        output = run(*args, **kwargs)
        self.keep(seen, output)
        return output

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in _pytree.tree_leaves(self.last) if isinstance(leaf, Tensor))

    def seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen | None:
        return Seen.of(given_to(self.model, args, kwargs))

    def is_skipped(self, seen: Seen | None) -> bool:
        """Whether no denoiser will run in the step of a call. It must be a pass that has come before: the denoiser runs
        in a pass that is new."""
        if seen is None:
            return False
        # This looks at the pipeline's variables: of those that it has exchanged, Python lets go only now.
        answers = [skipper.will_skip(seen.timestep) for skipper in self.skippers]
        known = [answer for answer in answers if answer is not None]
        return bool(known) and all(known) and self._knows(seen)

    def keep(self, seen: Seen | None, output: Any) -> None:
        if seen is None or torch.is_grad_enabled():
            return
        self.last = output
        known = [each for each in self.passes.get(seen.shapes, ()) if not each.is_gone]
        if not any(each.holds(seen.conditioning) for each in known):
            known.append(Identity(seen.conditioning))
        self.passes = {seen.shapes: known}

    def _knows(self, seen: Seen) -> bool:
        known = self.passes.get(seen.shapes)
        if known is None:
            return False
        return any(each.holds(seen.conditioning) for each in known) or all(each.is_gone for each in known)


def put_before(pipeline: Any, skipper: Skipper) -> nn.Module | None:
    """Have the ControlNet of a pipeline skip steps together with a denoiser. Returns it; None if there is none."""
    net = getattr(pipeline, "controlnet", None)
    net = getattr(net, "_orig_mod", net)
    if not isinstance(net, nn.Module):
        return None
    call = call_of(net)
    call = ControlCall(net) if call is None else call
    call.skippers.add(skipper)
    call.put()
    return net


def take_out(net: nn.Module, skipper: Skipper) -> None:
    """Undo `put_before`."""
    if (call := call_of(net)) is not None:
        call.skippers.discard(skipper)
        if not call.skippers:
            call.take_out()


def call_of(net: nn.Module) -> ControlCall | None:
    """What stands in front of a ControlNet, if anything does."""
    call = vars(net).get(CALL)
    return call if isinstance(call, ControlCall) else None


def keep_out_of_graphs() -> None:
    """Exclude the call from graphs, but not the ControlNet that it runs."""
    for name in ("seen", "is_skipped", "keep"):
        setattr(ControlCall, name, torch.compiler.disable(getattr(ControlCall, name)))
    skip_frames(ControlCall.answer)
