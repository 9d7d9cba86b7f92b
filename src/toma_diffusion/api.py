"""The public calls: put token merging into a pipeline or model, switch it, take it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from toma_diffusion.adapters import Adapter, Block, SiteSpec, _diffusers, find_adapter, supported
from toma_diffusion.baselines import METHODS, BaselineConfig, named_config
from toma_diffusion.config import SITES, Config, ToMAConfig
from toma_diffusion.core import MergePlan
from toma_diffusion.hooks.clock import StepClock
from toma_diffusion.hooks.handle import Placement, RootHook, ToMAHandle, find_root, install
from toma_diffusion.hooks.sites import EnterBlock, LeaveBlock, Run, Site
from toma_diffusion.hooks.state import MergeState, Slot
from toma_diffusion.hooks.summary import BlockRecord

DEFAULT_PRESET = "balanced"
"""Of a pipeline, if nothing else is named."""
DENOISERS = ("unet", "transformer")
"""Where diffusers pipelines keep their denoiser."""


def apply_toma(pipe_or_model: Any, config_or_preset: Config | str | None = None, **overrides: Any) -> ToMAHandle:
    """Merge tokens in a diffusers pipeline, or in its denoiser alone: by ToMA, or by a method to compare it with.

    Args:
        pipe_or_model: a pipeline with a supported `unet` or `transformer`, or that model itself. Give the pipeline
            where you can: it tells where a generation begins and how many steps it has (`window` counts its steps).
        config_or_preset: a `ToMAConfig`, taken as it stands; or the name of a preset; or nothing: `balanced` for a
            pipeline, `ToMAConfig()` for a model, of which nobody knows how many steps it will make. With a preset or
            nothing, what the model family wants otherwise is filled in (Flux: the paper's schedule, and its first 5
            joint and 5 single blocks left alone). For another method its name, `tomesd`, `tofu` or `todo`, or its
            configuration: `ToMeSDConfig`, `ToFuConfig`, `ToDoConfig`.
        overrides: single fields of the configuration to replace.

    Returns:
        A handle to switch merging off and on, to see what is merged, and to remove it.

    Example:

    ```python
    >>> import torch
    >>> from diffusers import UNet2DConditionModel
    >>> from toma_diffusion import apply_toma
    >>> unet = UNet2DConditionModel(
    ...     sample_size=16,
    ...     block_out_channels=(32, 64),
    ...     down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    ...     up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ...     layers_per_block=1,
    ...     norm_num_groups=8,
    ...     cross_attention_dim=32,
    ... )
    >>> handle = apply_toma(unet, ratio=0.5, num_regions=4)
    >>> _ = unet(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))
    >>> [(kind.kind, kind.tokens_before, kind.tokens_after) for kind in handle.summary().kinds]
    [('level 0', 256, 128), ('level 1', 64, 32)]
    >>> handle.remove()
    ```
    """
    model = find_denoiser(pipe_or_model)
    if find_root(model) is not None:
        raise RuntimeError(f"tokens are merged in this {type(model).__name__} already: call remove_toma first.")
    adapter = find_adapter(model)
    if adapter is None:
        raise ValueError(f"{type(model).__name__} is not supported. Supported are: {supported()}.")
    pipeline = pipe_or_model if not isinstance(pipe_or_model, nn.Module) else None
    if config_or_preset is None and pipeline is not None:
        config_or_preset = DEFAULT_PRESET
    config = _resolve(config_or_preset, overrides, adapter.defaults(model))
    return _build(model, adapter, config, pipeline)


def remove_toma(pipe_or_model: Any) -> None:
    """Take token merging out of a pipeline or model: it is then what it was before, bit for bit."""
    model = find_denoiser(pipe_or_model)
    if find_root(model) is None:
        raise RuntimeError(f"no tokens are merged in this {type(model).__name__}: there is nothing to remove.")
    ToMAHandle(model).remove()


@contextmanager
def toma_enabled(pipe_or_model: Any, enabled: bool = True) -> Iterator[ToMAHandle]:
    """Switch token merging on, or with `enabled=False` off, for the time of a `with` block."""
    handle = ToMAHandle(find_denoiser(pipe_or_model))
    before = handle.enabled
    handle.enabled = enabled
    try:
        yield handle
    finally:
        handle.enabled = before


def find_denoiser(pipe_or_model: Any) -> nn.Module:
    """The model in which tokens are merged."""
    if isinstance(pipe_or_model, nn.Module):
        return _diffusers.unwrap_compiled(pipe_or_model)
    for name in DENOISERS:
        model = getattr(pipe_or_model, name, None)
        if isinstance(model, nn.Module):
            return _diffusers.unwrap_compiled(model)
    raise ValueError(
        f"{type(pipe_or_model).__name__} is neither a model nor a pipeline with a {' or a '.join(DENOISERS)}. "
        f"Supported are: {supported()}."
    )


def _resolve(given: Config | str | None, overrides: dict[str, Any], defaults: dict[str, Any]) -> Config:
    if isinstance(given, Config):
        return type(given).from_dict(given.to_dict() | overrides)
    if given is None:
        return ToMAConfig.from_dict(defaults | overrides)
    if isinstance(given, str):
        known = METHODS.get(given, ToMAConfig)
        return named_config(given, {name: value for name, value in defaults.items() if known.knows(name)} | overrides)
    raise ValueError(
        f"{given!r} is not a configuration: give a ToMAConfig, the name of a preset, or nothing; for another method "
        f"its name, one of {', '.join(METHODS)}, or its configuration."
    )


def _build(model: nn.Module, adapter: Adapter, config: Config, pipeline: Any) -> ToMAHandle:
    if config.window != (0.0, 1.0) and pipeline is None:
        raise ValueError(
            f"window={config.window} needs the number of steps, which only a pipeline knows: "
            "apply to the pipeline, or use window=(0.0, 1.0)."
        )
    if config.scope != "module" and config.sites != SITES:
        raise ValueError(
            f"sites={config.sites} counts only in scope 'module'; scope={config.scope!r} merges whole blocks. "
            "Add scope='module', or leave sites out."
        )
    blocks = adapter.blocks(model)
    reasons = _reasons_to_leave_alone(model, blocks, config)
    state = MergeState(config, StepClock(pipeline))
    if isinstance(config, BaselineConfig):
        placements, records = config.place(blocks, reasons, state)
    else:
        put = _module_sites if config.scope == "module" else _block_sites
        placements, records = put(blocks, reasons, state)
        _note_missing_plans(state)
    merged = [record for record in records if record.left_alone is None]
    if not merged:
        told = "; ".join(sorted({record.left_alone for record in records if record.left_alone})) or "it has no blocks"
        raise ValueError(
            f"nothing would be merged in this {type(model).__name__} ({len(blocks)} transformer blocks: {told}). "
            f"Change the settings, or use one of: {supported()}."
        )
    ends = {blocks[0].name, blocks[-1].name}
    merges_an_end = config.scope != "module" and any(record.name in ends for record in merged)
    check = _refuse_new_cache if merges_an_end else _accept
    return install(model, RootHook(state, adapter.read_call, check, records, placements))


def _reasons_to_leave_alone(model: nn.Module, blocks: list[Block], config: Config) -> dict[int, str]:
    """By the blocks' indices."""
    beyond = [index for index in config.skip_blocks if index >= len(blocks)]
    if beyond:
        raise ValueError(
            f"skip_blocks={config.skip_blocks} names block {beyond[0]}, but this {type(model).__name__} has "
            f"{len(blocks)} transformer blocks, 0 to {len(blocks) - 1}."
        )
    reasons = dict.fromkeys(config.skip_blocks, "in skip_blocks")
    if config.scope != "module" and _diffusers.has_block_cache(model):
        # The cache compares the first block's output with the last one's: both must have the same, whole length.
        for index in (0, len(blocks) - 1):
            reasons.setdefault(index, "a block cache needs the first and the last block whole")
    return reasons


def _module_sites(
    blocks: list[Block], reasons: dict[int, str], state: MergeState
) -> tuple[list[Placement], list[BlockRecord]]:
    placements: list[Placement] = []
    records = []
    merged: Counter[str] = Counter()
    for index, block in enumerate(blocks):
        specs = block.chosen_sites(state.config.sites) if index not in reasons else []
        reason = reasons.get(index) or (None if specs else f"has none of the sites {', '.join(state.config.sites)}")
        for spec in specs:
            site = _site(state, block, merged[block.kind], spec)
            placements += [Placement(block.module, name, hook) for name, hook in spec.hooks(site)]
        merged[block.kind] += bool(specs)
        records.append(block.record(specs, reason))
    return placements, records


def _block_sites(
    blocks: list[Block], reasons: dict[int, str], state: MergeState
) -> tuple[list[Placement], list[BlockRecord]]:
    placements: list[Placement] = []
    records: list[BlockRecord] = []
    indexed = list(enumerate(blocks))
    runs: Counter[str] = Counter()
    # Consecutive blocks of one run that are all merged stay merged together; in `block` scope each is its own run.
    for (left_alone, _), group in groupby(
        indexed, key=lambda item: (item[0] in reasons, item[1].run if state.config.scope == "stage" else item[0])
    ):
        members = list(group)
        if left_alone:
            records += [block.record((), reasons[index]) for index, block in members]
            continue
        run = Run()
        for index, block in members:
            site = _site(state, block, runs[block.kind])
            first, last = index == members[0][0], index == members[-1][0]
            enter = EnterBlock(site, run, first, block.normalize, block.position_table)
            leave = LeaveBlock(site, run, last, block.stream)
            placements += [Placement(block.module, None, enter), Placement(block.module, None, leave)]
            records.append(BlockRecord(block.name, block.kind, block.width, (block.name,), int(first), None))
        runs.update({block.kind for _, block in members})
    return placements, records


def _site(state: MergeState, block: Block, number: int, spec: SiteSpec | None = None) -> Site:
    """A site of ToMA. Blocks of one kind, of which this is in that `number`, share a plan or take several in turn."""
    assert isinstance(state.config, ToMAConfig)
    turn = number % state.config.num_plans
    name = block.kind if turn == 0 else f"{block.kind}, plan {turn + 1}"
    slot = next((slot for slot in state.slots if slot.name == name), None)
    if slot is None:
        first = next((slot for slot in state.slots if slot.kind == block.kind), None)
        slot = Slot(name, block.kind, partial(MergePlan, config=state.config, turn=turn), beside=first)
        state.slots.append(slot)
    return Site(state, slot) if spec is None else Site(state, slot, spec.leave_alone)


def _note_missing_plans(state: MergeState) -> None:
    """Say where there are not enough blocks, or runs of blocks, to take `num_plans` in turn."""
    assert isinstance(state.config, ToMAConfig)
    wanted, takers = state.config.num_plans, "runs of blocks" if state.config.scope == "stage" else "merged blocks"
    for kind in state.kinds:
        found = sum(slot.kind == kind for slot in state.slots)
        if found < wanted:
            state.notes.add(f"{kind} takes {found} of the {wanted} plans: it has no more {takers}")


def _refuse_new_cache(model: nn.Module) -> None:
    if _diffusers.has_block_cache(model):
        raise RuntimeError(
            "a block cache was enabled after apply_toma, and in scopes 'block' and 'stage' it needs the first and the "
            "last block whole: call remove_toma, then apply_toma again with the cache on."
        )


def _accept(model: nn.Module) -> None:
    """Nothing to check."""
