"""What tests of reuse over time share: models told their steps, and what goes into and comes out of parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from observe import state_of
from tiny import output_of
from tiny_today import EVERY_FAMILY
from torch import Tensor, nn

from toma_diffusion import Reuse, ToMAConfig, ToMAHandle, apply_toma

BY_NAME = {family.name: family for family in EVERY_FAMILY}
PARTS = [(family, "blocks") for family in EVERY_FAMILY] + [(BY_NAME[name], "deep") for name in ("sd15", "sdxl")]
"""Every family, and what can be reused in it. UNets have more than their transformer blocks."""
OUTSIDE = ("txt_mode_blocks", "mode_blocks.image_cond", "noise_refiner", "context_refiner", "text_fusion")
"""Blocks that prepare the text, or the image before it meets the text. They belong to no part."""
ATTENTION_OUTSIDE = {"flux3": 2, "z-image": 2, "krea2": 2}
"""How often attention runs in them, before all others."""


def only_reuse(**fields) -> ToMAConfig:
    """Nothing is merged."""
    return ToMAConfig(ratio=0, scope="stage", select_every=1, reweigh_every=1, reuse=Reuse(**fields))


def generate(family, model: nn.Module, handle: ToMAHandle, steps: int, seed: int = 0, **extra) -> list[Tensor]:
    """The outputs of so many steps, each with an input of its own, told to the handle. `extra` goes to the model."""
    outputs = []
    handle.begin(steps)
    for step in range(steps):
        handle.step(step)
        outputs.append(call(family, model, seed + step, **extra))
    return outputs


def call(family, model: nn.Module, seed: int = 0, **extra) -> Tensor:
    return output_of(model, family.inputs(seed=seed) | extra)


def reusing(family, steps: int = 4, seed: int = 0, model: nn.Module | None = None, **fields) -> list[Tensor]:
    """The outputs of a fresh model."""
    model = model or family.build()
    return generate(family, model, apply_toma(model, only_reuse(**fields)), steps, seed)


def plain(family, steps: int = 4, seed: int = 0, **extra) -> list[Tensor]:
    """The outputs of a model that is left alone."""
    model = family.build()
    return [call(family, model, seed + step, **extra) for step in range(steps)]


def own_forwards(model: nn.Module) -> list[str]:
    """Modules whose `forward` is not that of their class."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@dataclass
class Ends:
    """What goes into a part and what comes out, call by call, seen by hooks put in after ours; and which layers run."""

    modules: tuple[nn.Module, ...]
    deep: bool
    """Whether the output counts alone: what goes in has another shape."""
    inputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """How many layers with weights ran."""

    def __post_init__(self):
        self.modules[0].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        self.modules[-1].register_forward_hook(self._leave)
        for module in self.modules:
            for layer in module.modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    layer.register_forward_hook(self._count)

    def _enter(self, module, args, kwargs):
        names = ("hidden_states", "encoder_hidden_states")
        self.inputs.append(tuple(kwargs.get(name, next(iter(args[index:]), None)) for index, name in enumerate(names)))
        self.layers.append(0)

    def _leave(self, module, args, output):
        streams = reversed(output) if isinstance(output, tuple) else (output,)  # blocks return text, then the image
        self.outputs.append(tuple(each.clone() for each in streams if each is not None))

    def _count(self, *_):
        self.layers[-1] += 1

    def change(self, step: int) -> tuple[Tensor, ...]:
        if self.deep:
            return self.outputs[step]
        return tuple(after - before for before, after in zip(self.inputs[step], self.outputs[step], strict=False))


def ends_of(model: nn.Module) -> dict[str, Ends]:
    return {
        part.name: Ends(part.modules, deep=any(stream.argument is None for stream in part.streams))
        for part in state_of(model).parts
    }


class Kinds:
    """For every call of a model its step, the pass over it, and whether parts were reused."""

    def __init__(self, model: nn.Module):
        self.seen: list[tuple[int, int, bool]] = []
        self.model = model
        self.hook = model.register_forward_hook(lambda *_: self._look())

    def _look(self):
        state = state_of(self.model)
        self.seen.append((state._last_tick.step, state._last_tick.ordinal, state.reusing))

    @property
    def reused(self) -> list[int]:
        """The steps in which the first pass reused."""
        return [step for step, ordinal, reused in self.seen if reused and ordinal == 0]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.hook.remove()
