"""Reuse over time: in some steps, parts of a model are not computed, and their last changes are used again.

It is not a method of its own but goes with any: tokens may be merged in the steps that are computed, or not.
"""

from __future__ import annotations

from torch import nn

from toma_diffusion.adapters import Adapter
from toma_diffusion.config import Config, Reuse
from toma_diffusion.core.schedule import FEWEST_FOR_LINES
from toma_diffusion.errors import UsageError
from toma_diffusion.hooks.handle import Placement, Replacement
from toma_diffusion.hooks.reuse import EnterPart, LeavePart, Part, StandIn
from toma_diffusion.hooks.state import MergeState


def reused_parts(config: Config, adapter: Adapter, model: nn.Module) -> list[Part]:
    """The parts of a model that a configuration reuses. None if it reuses nothing."""
    reuse = config.reuse
    if reuse is None:
        return []
    if reuse.update != "nothing":
        _check_update(config, reuse)
    parts = adapter.parts(model, deep=reuse.part == "deep")
    unknown = [name for name in reuse.keep if not any(part.name.startswith(name) for part in parts)]
    if unknown:
        raise UsageError(
            f"keep={reuse.keep} names {unknown[0]!r}, but no part of this {type(model).__name__} has a name that "
            f"begins so: they are {', '.join(part.name for part in parts)}."
        )
    parts = [part for part in parts if not part.name.startswith(reuse.keep or ("\0",))]
    if not parts:
        raise UsageError(f"keep={reuse.keep} names all parts of this {type(model).__name__}: nothing is left to reuse.")
    return parts


def place_reuse(parts: list[Part], state: MergeState) -> tuple[list[Placement], list[Placement]]:
    """The hooks of all parts: those that must come before the hooks that merge, and those that come after them."""
    before: list[Placement] = []
    after: list[Placement] = []
    for part in parts:
        before.append(Placement(part.modules[0], None, EnterPart(part)))
        after.append(Placement(part.modules[-1], None, LeavePart(part, state)))
        for module, instead in zip(part.modules, part.stand_ins, strict=True):
            after.append(Replacement(module, StandIn(module, state, instead)))
    state.parts = parts
    return before, after


def describe_reuse(reuse: Reuse | None, parts: list[Part]) -> list[str]:
    """What is reused, and when, line by line, for `summary()`."""
    if reuse is None:
        return []
    if reuse.computed is None and reuse.period == 1:
        return ["nothing is reused: period=1"]
    below = any(stream.argument is None for part in parts for stream in part.streams)
    what = "everything below the first level, and of blocks above it" if below else "runs of blocks"
    what += ", image and text alike" if any(part.holds_text for part in parts) else ""
    lines = [f"reuse over time: {_when(reuse)}", f"reused are the changes of {what}, {_how(reuse)}"]
    if reuse.min_steps > 1:
        lines.append(f"nothing is reused in generations of fewer than {reuse.min_steps} steps")
    if reuse.update != "nothing":
        lines.append(f"merged tokens correct what is reused: {reuse.update}")
    return lines


def _when(reuse: Reuse) -> str:
    if reuse.computed is not None:
        return f"all steps but {', '.join(map(str, reuse.computed))} reuse"
    if reuse.growth > 1 or reuse.period != int(reuse.period):
        early = ", most of them early" if reuse.growth > 1 else ""
        share = f"on average one step in {reuse.period:g} is computed{early}, the others reuse"
    else:
        share = "every second step reuses" if reuse.period == 2 else f"{reuse.period - 1} of {reuse.period} steps reuse"
    if reuse.min_computed > 1:
        share += f", and at least {reuse.min_computed} are computed"
    first = f"the first {reuse.start:.0%} of the steps" if reuse.start else "the first step"
    last = f" and the last {reuse.end:.0%}" if reuse.end else ""
    verb = "is" if first == "the first step" and not last else "are"
    return f"{share}; {first}{last} {verb} computed"


def _how(reuse: Reuse) -> str:
    if reuse.order == 0:
        return "as in the last computed step"
    line = "continued in a line from the last two computed steps"
    if isinstance(reuse.order, str):
        return f"{line} where more than {FEWEST_FOR_LINES} are computed"
    return line if reuse.order == 1 else f"{line}, for {reuse.order:.0%} of the way"


def _check_update(config: Config, reuse: Reuse) -> None:
    if config.scope != "stage" or not config.ratio or config.skip_blocks or reuse.part != "blocks" or reuse.keep:
        raise UsageError(
            f"update={reuse.update!r} corrects what is remembered of a run of blocks by merged tokens. It needs "
            f"scope='stage' (here {config.scope!r}), a ratio above 0 (here {config.ratio:g}), part='blocks' (here "
            f"{reuse.part!r}), and all blocks: no skip_blocks (here {config.skip_blocks}) and no keep (here "
            f"{reuse.keep})."
        )
