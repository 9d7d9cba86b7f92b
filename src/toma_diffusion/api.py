"""The two calls: `speed_up` makes a pipeline faster, `apply_toma` merges its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toma_diffusion import presets
from toma_diffusion.engine import upstream
from toma_diffusion.engine.clock import StepCounter
from toma_diffusion.engine.hooks import Placement
from toma_diffusion.engine.install import RootHook, find_denoisers, find_root, install
from toma_diffusion.engine.session import Session
from toma_diffusion.errors import UsageError
from toma_diffusion.families import Family, find_family, unsupported
from toma_diffusion.handle import Handle
from toma_diffusion.merge.base import Merging
from toma_diffusion.merge.block import Block
from toma_diffusion.merge.state import MergeState
from toma_diffusion.merge.variants import VARIANTS
from toma_diffusion.merge.variants import variant as named_variant
from toma_diffusion.others import METHODS, method_of
from toma_diffusion.presets import Chosen
from toma_diffusion.skip.config import Skip
from toma_diffusion.skip.denoiser import Skipper, keep_out_of_graphs
from toma_diffusion.skip.learned import Learned
from toma_diffusion.tuned import SUFFIX, Tuned

CONVOLUTIONAL_BLOCK = "ResnetBlock2D"
"""The residual blocks of UNets, which are compiled together with the transformer blocks."""


def speed_up(
    pipe: Any,
    preset: str | Path | None = None,
    *,
    merge: Merging | None = None,
    skip: Skip | None = None,
    learned: str | Path | Learned | None = None,
) -> Handle:
    """Make a diffusers pipeline, or its denoiser, faster: by skipping steps, by merging tokens, or by both.

    Args:
        pipe: a pipeline with a `unet` or `transformer`, or that model itself, or a list of them. All denoisers of a
            pipeline are taken: Wan 2.2 has two. Steps can be skipped with any of them; tokens are merged in the
            families that `toma_diffusion.families` has. In a loop without a pipeline, call `handle.begin` and
            `handle.step`.
        preset: `balanced` (closest to the original), `fast` or `faster`. If nothing at all is passed, it is
            `balanced`. Or a file that `toma tune` wrote, `"tuned.json"`: it is refused for another class of model or
            another number of steps.
        merge: how tokens are merged: `Merge(ratio=0.5)`, or the settings of another method. In place of what the preset
            does.
        skip: which steps are skipped: `Skip(computed=10)`. In place of what the preset does.
        learned: what was learned of skipped steps on this model: the file that `handle.save` or `toma learn` wrote.

    Returns:
        A handle to look at what is done, to switch it off and on, to compile the model, to learn, and to remove it.

    Example:

    ```python
    >>> import torch
    >>> from diffusers import UNet2DConditionModel
    >>> from toma_diffusion import Merge, speed_up
    >>> unet = UNet2DConditionModel(
    ...     sample_size=16,
    ...     block_out_channels=(32, 64),
    ...     down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    ...     up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ...     layers_per_block=1,
    ...     norm_num_groups=8,
    ...     cross_attention_dim=32,
    ... )
    >>> handle = speed_up(unet, merge=Merge(ratio=0.5))
    >>> _ = unet(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))
    >>> print(handle.summary().merge.headline)
    half of 256 and 64 tokens merged in 3 of 4 blocks
    >>> handle.remove()
    ```
    """
    if isinstance(preset, Path) or str(preset).endswith(SUFFIX):
        return _apply_tuned(pipe, str(preset), merge=merge, skip=skip, learned=learned)
    if preset is None and merge is None and skip is None:
        preset = presets.DEFAULT
    if preset is not None and not isinstance(preset, str):
        raise UsageError(f"preset={preset!r} is not a name: pass settings as merge=… and skip=….")
    if isinstance(preset, str) and preset in VARIANTS:
        raise UsageError(f"{preset!r} is a variant of merging: call apply_toma(pipe, {preset!r}).")
    if isinstance(preset, str) and preset in METHODS:
        raise UsageError(f"{preset!r} is another method: call speed_up(pipe, merge={METHODS[preset].__name__}(…)).")
    for name, value, kind in (("merge", merge, Merging), ("skip", skip, Skip)):
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{name}={value!r} is not allowed: pass {name}={name.capitalize()}(…).")
    if learned is not None and skip is None and preset is None:
        raise UsageError("learned says how steps are skipped, and none is: pass a preset or skip=Skip(…) too.")
    chosen = Chosen(
        None if preset is None else presets.named(preset),
        merge,
        skip,
        None if learned is None else Learned.from_any(learned),
    )
    return _apply(pipe, lambda family, model: chosen)


def apply_toma(pipe: Any, variant: str = "toma-stage", *, ratio: float | None = None) -> Handle:
    """Merge tokens by ToMA (Token Merge with Attention) in all steps, and skip none.

    Args:
        pipe: as in `speed_up`.
        variant: `toma-stage` is ours and the fastest, `toma-late` ours and the closest to the original; `toma`,
            `toma-stripe`, `toma-tile` and `toma-once` are the paper's. For single settings: `speed_up(pipe,
            merge=Merge(…))`.
        ratio: the fraction of the tokens that is removed. Default: 0.5.

    Returns:
        A handle.
    """
    if variant in presets.PRESETS:
        raise UsageError(f"{variant!r} is a preset, which merges nothing by itself: call speed_up(pipe, {variant!r}).")
    if variant in METHODS:
        method = METHODS[variant].__name__
        raise UsageError(f"{variant!r} is another method than ToMA: call speed_up(pipe, merge={method}(…)).")

    def choose(family: Family | None, model: nn.Module) -> Chosen:
        selects_every_step = family is not None and family.selects_every_step(model)
        return Chosen(merge=named_variant(variant, ratio, selects_every_step=selects_every_step))

    return _apply(pipe, choose)


def speed_up_model(family: Family | None, model: nn.Module, chosen: Chosen) -> Handle:
    """What `speed_up` does with a model whose family is known: for programs with models of their own."""
    return _installed({model: _build(model, family, chosen, Session(StepCounter()))})


Choose = Callable[["Family | None", nn.Module], Chosen]


def _apply(pipe: Any, choose: Choose, only_steps: int | None = None) -> Handle:
    several = pipe if isinstance(pipe, (list, tuple)) else [pipe]
    if not several:
        raise UsageError(f"pipe={pipe!r} is empty: pass a pipeline, a model, or a list of them.")
    roots: dict[nn.Module, RootHook] = {}
    for each in several:
        models, pipeline = find_denoisers(each), None if isinstance(each, nn.Module) else each
        steps = StepCounter(pipeline)  # the denoisers of a pipeline take turns in one count of steps
        for model in models:
            if find_root(model) is not None:
                raise RuntimeError(
                    f"this {type(model).__name__} was sped up already: call Handle.of(pipe).remove() first."
                )
            if model not in roots:
                family = find_family(model)
                roots[model] = _build(model, family, choose(family, model), Session(steps, only_steps=only_steps))
    return _installed(roots)


def _installed(roots: Mapping[nn.Module, RootHook]) -> Handle:
    keep_out_of_graphs()
    install(roots)
    return Handle(*roots)


def _apply_tuned(pipe: Any, path: str, **others: Any) -> Handle:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UsageError(
            f"{path!r} is used as it was measured, and cannot be changed by {', '.join(given)}: pass a preset or "
            "settings instead."
        )
    tuned = Tuned.read(path)

    def choose(family: Family | None, model: nn.Module) -> Chosen:
        tuned.check_model(model)
        return tuned.chosen()

    return _apply(pipe, choose, tuned.steps_left)


def _build(model: nn.Module, family: Family | None, chosen: Chosen, session: Session) -> RootHook:
    """All hooks of one denoiser, which are not installed yet."""
    skips = chosen.ever_skips
    if skips and upstream.has_block_cache(model):
        raise UsageError(
            "skipped steps cannot be combined with a block cache, which skips parts of them too: use one of them."
        )
    state: MergeState | None = None
    placements: list[Placement] = []
    if (merging := chosen.merging) is not None:
        obstacle = _merging_obstacle(model, family)
        if obstacle is None:
            assert family is not None
            state, placements = _place(model, family, merging, chosen, session)
            obstacle = _nothing_merged(model, state, is_default=merging.skip_blocks is None)
        if obstacle is not None and chosen.merge is not None:
            raise UsageError(obstacle)
        if obstacle is not None:
            state, placements = None, []
            session.notes.add(f"no tokens are merged: {obstacle}")
    skipper = Skipper(model, chosen.skips_in, session) if skips else None
    if skipper is not None:
        skipper.learned = chosen.learned or (None if chosen.skip is None else chosen.skip.learned)
    if state is not None:
        state.is_required = chosen.merge is not None
    session.preset = chosen.name
    session.techniques = [each for each in (state, skipper) if each is not None]
    return RootHook(
        session,
        LateChanges(None if state is None else state.config.scope, _merges_an_end(state), skips),
        partial(compiled_blocks, family=family),
        partial(graphs_obstacle, family=family),
        placements,
        state,
        skipper,
    )


def _place(
    model: nn.Module, family: Family, merging: Merging, chosen: Chosen, session: Session
) -> tuple[MergeState, list[Placement]]:
    """The hooks that merge, and their state."""
    blocks = family.blocks(model)
    config, default = _settle(merging, family.skip_blocks(model))
    reasons = _reasons_to_leave_whole(model, blocks, config, default)
    method = method_of(config)
    state = MergeState(config, session, family.read_call, chosen.merges_in, description=tuple(method.describe(config)))
    placements, state.records = method.place(config, blocks, reasons, state)
    return state, placements


def _nothing_merged(model: nn.Module, state: MergeState, *, is_default: bool) -> str | None:
    """Why no block of a model is merged, if none is."""
    reasons = {record.left_whole for record in state.records}
    if None in reasons:
        return None
    found = "; ".join(sorted(filter(None, reasons))) or "it has no blocks"
    advice = "pass skip_blocks=()" if is_default else "change the settings"
    blocks = f"{len(state.records)} transformer blocks"
    return f"nothing would be merged in this {type(model).__name__} ({blocks}: {found}): {advice}."


def _settle(merging: Merging, default: tuple[int, ...] | None) -> tuple[Merging, bool]:
    """The settings with the blocks that are left whole, and whether those are a default."""
    if merging.skip_blocks is not None:
        return merging, False
    if default is None:
        default = (-1,) if merging.skips_last_block else ()
    return merging.changed({"skip_blocks": default}), True


def _merging_obstacle(model: nn.Module, family: Family | None) -> str | None:
    """Why no tokens can be merged in a model, if so."""
    if family is None:
        return str(unsupported(model))
    if (obstacle := family.obstacle(model)) is not None:
        return obstacle
    devices = upstream.devices_of_map(model)
    if len(devices) > 1:
        return (
            f"the blocks of this {type(model).__name__} lie on several devices ({', '.join(devices)}), which cannot be "
            "merged: load it without a device_map, or onto one device."
        )
    return None


def _reasons_to_leave_whole(model: nn.Module, blocks: list[Block], config: Merging, is_default: bool) -> dict[int, str]:
    """By the blocks' indices."""
    count, skipped = len(blocks), config.skip_blocks or ()
    beyond = [index for index in skipped if not -count <= index < count]
    if beyond and count:
        raise UsageError(
            f"skip_blocks={skipped} names block {beyond[0]}, but this {type(model).__name__} has "
            f"{count} transformer blocks, 0 to {count - 1}, or from the end -1 to {-count}."
        )
    why = f"by default (skip_blocks={skipped})" if is_default else "in skip_blocks"
    reasons = dict.fromkeys([index % count for index in skipped if count], why)
    if config.scope != "module" and upstream.has_block_cache(model):
        # The cache compares the first block's output with the last one's: both must have the same, whole length.
        for index in (0, len(blocks) - 1):
            reasons.setdefault(index, "a block cache needs the first and the last block whole")
    return reasons


def _merges_an_end(state: MergeState | None) -> bool:
    """Whether the first or the last block is merged as a whole."""
    if state is None or state.config.scope == "module":
        return False
    return any(state.records[end].left_whole is None for end in (0, -1))


@dataclass(frozen=True)
class LateChanges:
    """Raises if the model was changed, also after `speed_up`, in a way that is not allowed."""

    scope: str | None
    """Of merging; None if nothing is merged."""
    merges_an_end: bool
    """Whether the first or the last block is merged as a whole."""
    skips: bool
    """Whether steps are skipped."""

    def __call__(self, model: nn.Module) -> None:
        """Look at the model as it is now."""
        if self.skips and upstream.has_block_cache(model):
            raise RuntimeError(
                "a block cache was enabled on a model whose steps are skipped, and it skips them too: switch the cache "
                "off, or call handle.remove()."
            )
        if self.merges_an_end and upstream.has_block_cache(model):
            raise RuntimeError(
                "a block cache was enabled on a model whose first or last block is merged, and it needs both whole: "
                "call handle.remove(), then speed_up again with the cache on."
            )
        merges_whole_blocks = self.scope not in (None, "module")
        if merges_whole_blocks and torch.is_grad_enabled() and upstream.recomputes(model):
            raise RuntimeError(
                f"gradient checkpointing runs blocks a second time, which scope={self.scope!r} cannot follow: "
                "use scope='module', call disable_gradient_checkpointing, or run under torch.no_grad()."
            )


def compiled_blocks(model: nn.Module, family: Family | None = None) -> list[nn.Module]:
    """What is compiled block by block. The family is looked up if it is not given."""
    family = family or find_family(model)
    if family is None:
        repeated = getattr(model, "_repeated_blocks", None) or ()
        return [module for module in model.modules() if type(module).__name__ in repeated]
    blocks = [block.module for block in family.blocks(model)]
    return blocks + [module for module in model.modules() if type(module).__name__ == CONVOLUTIONAL_BLOCK]


def graphs_obstacle(model: nn.Module, family: Family | None = None) -> str | None:
    """Why a model cannot be captured as CUDA graphs, if so. The family is looked up if it is not given."""
    if upstream.has_block_cache(model):
        return "a block cache decides in every step what to run"
    if upstream.is_offloaded(model):
        return "weights are offloaded, and move while the model runs"
    family = family or find_family(model)
    return family.untraceable if family is not None else None
