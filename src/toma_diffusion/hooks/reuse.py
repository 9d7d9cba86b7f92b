"""Parts of a model that are not computed in some steps: what they did in earlier ones is used again.

A forward hook cannot keep a module from running. So every module of a part gets a `forward` of its own, in its
instance, that returns its input as it is in steps that reuse. Hooks around the part remember its change, or add it.
docs/design.md says why it is done so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from toma_diffusion.core.memory import Remembered
from toma_diffusion.hooks.arguments import Arguments, Given, Keywords, parameter_names
from toma_diffusion.hooks.sites import Hook
from toma_diffusion.hooks.state import Call, MergeState

TEXT = "encoder_hidden_states"
"""What diffusers calls the text that goes through blocks."""


@dataclass(frozen=True)
class Stream:
    """One of the tensors that go through a part, such as image tokens or text tokens."""

    shape: Callable[[Call], tuple[int, ...]]
    """Its shape in a call."""
    output: int | None = None
    """Which of the outputs of the last module it is; None if that returns a single tensor."""
    argument: str | None = None
    """The argument of the first module that it comes from. None if it does not come from one of the same shape: then
    the output itself is remembered, not the change."""

    def read(self, given: Given) -> Tensor | None:
        """The tensor before the part."""
        return None if self.argument is None else given[self.argument]


@dataclass(frozen=True)
class PassOn:
    """What a transformer block returns if it does not run: its tokens as they are."""

    stream: int | None = None
    """Which of two outputs is the image stream; None if the block returns one tensor."""
    other: str = TEXT
    """The argument that the other output comes from."""

    def __call__(self, module: nn.Module, given: Given) -> Any:
        """The tokens."""
        if self.stream is None:
            return given.tokens
        other = given[self.other]
        return (given.tokens, other) if self.stream == 0 else (other, given.tokens)


@dataclass(eq=False)
class Part:
    """Consecutive modules that are computed together, or not at all."""

    name: str
    modules: tuple[nn.Module, ...]
    """In the order in which they run."""
    stand_ins: tuple[Callable[[nn.Module, Given], Any], ...]
    """For every module, what it returns if it does not run."""
    streams: tuple[Stream, ...]
    memory: Remembered | None = None
    """Of the current call; None if this call neither remembers nor reuses."""
    inputs: tuple[Tensor | None, ...] | None = None
    """What went in, while the part runs."""
    holds_text: bool = False
    """Whether text goes through the part, in a stream of its own or in one sequence with the image."""
    writes_in_place: bool = False
    """Whether something writes into the tokens that go through the part."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"memory": None, "inputs": None}  # a copied or pickled model begins a new generation


@dataclass(eq=False)
class EnterPart(Hook):
    """Forward pre-hook of the first module of a part: keeps what goes in."""

    part: Part

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Before any other hook of the module."""
        part = self.part
        if part.memory is not None:
            given = Given(self.names, args, kwargs)
            inputs = [stream.read(given) for stream in part.streams]
            if part.writes_in_place:
                inputs = [None if each is None else each.clone() for each in inputs]
            part.inputs = tuple(inputs)


@dataclass(eq=False)
class LeavePart(Hook):
    """Forward hook of the last module of a part: remembers the change, or adds the one that is remembered."""

    before = False

    part: Part
    state: MergeState

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        """After all other hooks of the module."""
        part = self.part
        memory, inputs = part.memory, part.inputs
        if memory is None:
            return output
        if inputs is None:
            raise RuntimeError(f"the first module of {part.name} was skipped, so nothing can be remembered of it.")
        part.inputs = None
        if self.state.reusing:
            # A copy, not what is remembered itself: FreeU, for one, works on it in place.
            results = [
                change.clone() if whole is None else whole + change
                for whole, change in zip(inputs, memory.recall(), strict=True)
            ]
            return _with(output, part.streams, results)
        after = [output if stream.output is None else output[stream.output] for stream in part.streams]
        memory.store([result if whole is None else result - whole for whole, result in zip(inputs, after, strict=True)])
        return output


def _with(output: Any, streams: tuple[Stream, ...], results: list[Tensor]) -> Any:
    """The output with other tensors for these streams."""
    if streams[0].output is None:
        return results[0]
    replaced = {stream.output: result for stream, result in zip(streams, results, strict=True)}
    return tuple(replaced.get(index, item) for index, item in enumerate(output))


@dataclass(eq=False)
class StandIn:
    """The `forward` of a module that belongs to a part. It runs the module's own one, or returns what stands for it.

    A plain object, not a function, so that a model with it can be copied and pickled.
    """

    module: nn.Module
    state: MergeState
    instead: Callable[[nn.Module, Given], Any]
    before: Callable[..., Any] | None = None
    """The `forward` that the instance had before, such as that of an offloading hook; None if it was its class's."""
    of_class: Callable[..., Any] | None = None
    """The `forward` of its class."""
    removed: bool = False
    """Set when it was removed but something else still calls it."""

    def __post_init__(self) -> None:
        self.names = parameter_names(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of `forward`."""
        if self.state.reusing and not self.removed:
            return self.instead(self.module, Given(self.names, args, kwargs))
        if self.before is not None:
            return self.before(*args, **kwargs)
        return self.of_class(self.module, *args, **kwargs)  # type: ignore[misc]

    def put(self) -> None:
        """Take the place of the module's `forward`."""
        self.before = vars(self.module).get("forward")
        self.of_class = type(self.module).forward
        self.module.forward = self

    @property
    def is_out(self) -> bool:
        """Whether nothing calls it any more: offloading that ends puts the `forward` of the class back, and offloading
        that is then put in anew wraps that one."""
        own = vars(self.module)
        forward = own.get("forward")
        if forward is None or getattr(forward, "__func__", None) is type(self.module).forward:
            return True
        is_offloaded = "_old_forward" in own or own.get("_diffusers_hook") is not None
        return is_offloaded and not any(each is self for each, _ in self._held())

    def take_out(self) -> None:
        """Put back what was there before, also if something has wrapped this since."""
        self.removed = True
        own = vars(self.module)
        if own.get("forward") is self:
            if self.before is None:
                del self.module.forward
            else:
                self.module.forward = self.before
            return
        original = self.before or MethodType(type(self.module).forward, self.module)
        for held, replace in self._held():
            if held is self:
                replace(original)

    def _held(self) -> Iterator[tuple[Any, Callable[[Any], None]]]:
        """Every place in which the module's `forward` may be kept, what is there, and how to replace it."""
        module = self.module
        own = vars(module)
        for name in ("forward", "_old_forward"):  # accelerate keeps what its hooks wrap in the second
            if name in own:
                yield own[name], partial(setattr, module, name)
        for reference in getattr(own.get("_diffusers_hook"), "_fn_refs", ()):
            for name in ("forward", "original_forward"):
                if hasattr(reference, name):
                    yield getattr(reference, name), partial(setattr, reference, name)
