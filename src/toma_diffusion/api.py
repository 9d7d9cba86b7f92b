"""The public calls: make a pipeline or model faster, switch that off and on, remove it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toma_diffusion.engine import upstream
from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.clock import DENOISERS, StepCounter
from toma_diffusion.engine.install import RootHook, find_root, install
from toma_diffusion.errors import UsageError
from toma_diffusion.families import Adapter, Block, find_adapter, supported, unsupported
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.merge.base import Config
from toma_diffusion.merge.state import Call, MergeState
from toma_diffusion.others import defaults_that_count, method_of, resolve_config
from toma_diffusion.skip.denoiser import Skipper, keep_out_of_graphs
from toma_diffusion.skip.history import Seen
from toma_diffusion.tuned import SUFFIX, Tuned

DEFAULT_PRESET = "balanced"
"""What a pipeline uses if you pass no preset."""
CONVOLUTIONAL_BLOCK = "ResnetBlock2D"
"""The residual blocks of UNets, which are compiled together with the transformer blocks."""


def apply_toma(pipe_or_model: Any, config_or_preset: Config | str | Path | None = None, **overrides: Any) -> ToMAHandle:
    """Make a diffusers pipeline, or its denoiser, faster: by skipping steps, by merging tokens, or by both.

    Args:
        pipe_or_model: a pipeline with a `unet` or `transformer`, or that model itself, or a list of them. All denoisers
            of a pipeline are taken: Wan 2.2 has two. Steps can be skipped with any of them; tokens are merged in the
            families that have an adapter. In a loop without a pipeline, call `handle.begin` and `handle.step`.
        config_or_preset: the name of a preset, or a `ToMAConfig`, which is used as it is. If you pass neither, a
            pipeline uses the preset `balanced`, and a model `ToMAConfig()`. Unless you pass a configuration, defaults
            of the model family fill the fields you did not set (Flux: destinations are selected in every step, the
            first 5 joint and 5 single blocks are not merged). For another method: `tomesd`, `tofu`, `todo`, or a
            `ToMeSDConfig`, `ToFuConfig`, `ToDoConfig`. Or a file that `toma tune` wrote, `"tuned.json"`: it is used as
            it is, and refused for another class of model or another number of steps.
        overrides: fields of the configuration to change.

    Returns:
        A handle to inspect merging, to switch it off and on, to compile the model, and to remove merging.

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
    several = pipe_or_model if isinstance(pipe_or_model, (list, tuple)) else [pipe_or_model]
    roots: dict[nn.Module, RootHook] = {}
    for each in several:
        models, pipeline = find_denoisers(each), None if isinstance(each, nn.Module) else each
        steps = StepCounter(pipeline)  # the denoisers of a pipeline take turns in one count of steps
        for model in models:
            if model not in roots:
                roots[model] = _accelerate(model, pipeline, steps, config_or_preset, overrides)
    return _installed(roots)


def _installed(roots: Mapping[nn.Module, RootHook]) -> ToMAHandle:
    keep_out_of_graphs()
    install(roots)
    return ToMAHandle(*roots)


def _accelerate(
    model: nn.Module,
    pipeline: Any,
    steps: StepCounter,
    config_or_preset: Config | str | Path | None,
    overrides: Mapping[str, Any],
) -> RootHook:
    """All hooks of one denoiser, which are not installed yet."""
    if find_root(model) is not None:
        raise RuntimeError(f"apply_toma was called on this {type(model).__name__} already: call remove_toma first.")
    adapter = find_adapter(model)
    if isinstance(config_or_preset, Path) or str(config_or_preset).endswith(SUFFIX):
        tuned = _read_tuned(model, str(config_or_preset), overrides)
        return _build(model, adapter, tuned.applicable(), steps, only_steps=tuned.steps_left)
    if config_or_preset is None and pipeline is not None:
        config_or_preset = DEFAULT_PRESET
    return _resolve(adapter, model, steps, config_or_preset, overrides)


def apply_with(
    adapter: Adapter | None, model: nn.Module, config_or_preset: Config | str | None, overrides: Mapping[str, Any]
) -> ToMAHandle:
    """What `apply_toma` does with a model whose adapter is known: for programs with models of their own."""
    return _installed({model: _resolve(adapter, model, StepCounter(), config_or_preset, overrides)})


def _resolve(
    adapter: Adapter | None,
    model: nn.Module,
    steps: StepCounter,
    config_or_preset: Config | str | None,
    overrides: Mapping[str, Any],
) -> RootHook:
    """Fill the settings in with the defaults of the model family."""
    defaults = {} if adapter is None else adapter.defaults(model)
    config = resolve_config(config_or_preset, overrides, defaults)
    obstacle = _merging_obstacle(model, adapter)
    if obstacle is not None and overrides.get("ratio"):
        raise UsageError(obstacle)
    used = defaults_that_count(config_or_preset, overrides, defaults)
    return _build(model, adapter, config, steps, defaults=used)


def remove_toma(pipe_or_model: Any) -> None:
    """Undo `apply_toma` on a pipeline or model. It is then what it was before, bit for bit."""
    ToMAHandle(*_accelerated(pipe_or_model)).remove()


@contextmanager
def toma_enabled(pipe_or_model: Any, enabled: bool = True) -> Iterator[ToMAHandle]:
    """Switch merging and skipped steps on, or off with `enabled=False`, for the duration of a `with` block."""
    models = _accelerated(pipe_or_model)
    before = {model: ToMAHandle(model).enabled for model in models}
    handle = ToMAHandle(*models)
    handle.enabled = enabled
    try:
        yield handle
    finally:
        for model, was_enabled in before.items():
            if find_root(model) is not None:
                ToMAHandle(model).enabled = was_enabled


def _accelerated(pipe_or_model: Any) -> list[nn.Module]:
    """The denoisers on which `apply_toma` was called."""
    models = [model for model in find_denoisers(pipe_or_model) if find_root(model) is not None]
    if not models:
        name = type(find_denoiser(pipe_or_model)).__name__
        raise RuntimeError(f"apply_toma was not called on this {name}: there is nothing to remove or to switch.")
    return models


def find_denoiser(pipe_or_model: Any) -> nn.Module:
    """The model in which tokens are merged; the first if a pipeline has several."""
    return find_denoisers(pipe_or_model)[0]


def find_denoisers(pipe_or_model: Any) -> list[nn.Module]:
    """All denoisers of a pipeline, or the model itself."""
    if isinstance(pipe_or_model, nn.Module):
        return [upstream.unwrap_compiled(pipe_or_model)]
    found = [getattr(pipe_or_model, name, None) for name in DENOISERS]
    models = [upstream.unwrap_compiled(model) for model in found if isinstance(model, nn.Module)]
    if models:
        return list(dict.fromkeys(models))
    raise UsageError(
        f"{type(pipe_or_model).__name__} is neither a model nor a pipeline with a {' or a '.join(DENOISERS[:2])}. "
        f"Supported are: {supported()}."
    )


def _read_tuned(model: nn.Module, path: str, overrides: Mapping[str, Any]) -> Tuned:
    tuned = Tuned.read(path)
    tuned.check_model(model)
    if overrides:
        raise UsageError(
            f"{path!r} is used as it was measured, and cannot be changed by {', '.join(overrides)}: pass a "
            "configuration or a preset instead."
        )
    return tuned


def _build(
    model: nn.Module,
    adapter: Adapter | None,
    config: Config,
    steps: StepCounter,
    only_steps: int | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RootHook:
    method, skips = method_of(config), config.skip is not None
    if skips and upstream.has_block_cache(model):
        raise UsageError(
            "skipped steps cannot be combined with a block cache, which skips parts of them too: use one of them."
        )
    state = MergeState(
        config,
        steps,
        description=(*_describe_defaults(defaults or {}), *method.describe(config)),
        only_steps=only_steps,
    )
    blocks = [] if adapter is None else adapter.blocks(model)
    obstacle = _merging_obstacle(model, adapter)
    if obstacle is not None:
        if not skips:
            raise UsageError(obstacle)
        if config.ratio:
            state.notes.add(f"no tokens are merged: {obstacle}")
        blocks = []
    reasons = _reasons_to_leave_alone(model, blocks, config)
    if skips and config.ratio == 0:
        reasons = dict.fromkeys(range(len(blocks)), "no tokens are merged: ratio 0")
    placements, records = method.place(config, blocks, reasons, state)
    merged = [record for record in records if record.left_alone is None]
    if not merged and not skips:
        found = "; ".join(sorted({record.left_alone for record in records if record.left_alone}))
        raise UsageError(
            f"nothing would be merged in this {type(model).__name__} "
            f"({len(blocks)} transformer blocks: {found or 'it has no blocks'}). "
            f"Change the settings, or use one of: {supported()}."
        )
    ends = {blocks[0].name, blocks[-1].name} if blocks else set()
    merges_an_end = config.scope != "module" and any(record.name in ends for record in merged)
    return RootHook(
        state,
        adapter.read_call if adapter is not None and merged else read_any_call,
        LateChanges(config.scope if merged else None, merges_an_end, skips),
        partial(compiled_blocks, adapter=adapter),
        partial(graphs_obstacle, adapter=adapter),
        records,
        placements,
        None if config.skip is None else Skipper(model, config.skip, state),
    )


def _merging_obstacle(model: nn.Module, adapter: Adapter | None) -> str | None:
    """Why no tokens can be merged in a model, if so."""
    if adapter is None:
        return str(unsupported(model))
    if (obstacle := adapter.obstacle(model)) is not None:
        return obstacle
    devices = upstream.devices_of_map(model)
    if len(devices) > 1:
        return (
            f"the blocks of this {type(model).__name__} lie on several devices ({', '.join(devices)}), which cannot be "
            "merged: load it without a device_map, or onto one device."
        )
    return None


def read_any_call(model: nn.Module, given: Given) -> Call:
    """The facts about a call of a model without an adapter."""
    seen = Seen.of(given)
    if seen is None:
        raise UsageError(f"no noisy sample was found among the arguments of {type(model).__name__}.")
    return Call(seen.sample, seen.conditioning, seen.timestep, batch=seen.batch)


def _describe_defaults(defaults: Mapping[str, Any]) -> list[str]:
    """Which settings come from the model family, in a line for `summary()`."""
    used = [f"{name}={value}" for name, value in defaults.items() if value]
    return [f"defaults of this model family: {', '.join(used)}"] if used else []


def _reasons_to_leave_alone(model: nn.Module, blocks: list[Block], config: Config) -> dict[int, str]:
    """By the blocks' indices."""
    count = len(blocks)
    beyond = [index for index in config.skip_blocks if not -count <= index < count]
    if beyond:
        raise UsageError(
            f"skip_blocks={config.skip_blocks} names block {beyond[0]}, but this {type(model).__name__} has "
            f"{count} transformer blocks, 0 to {count - 1}, or from the end -1 to {-count}."
        )
    reasons = dict.fromkeys([index % count for index in config.skip_blocks], "in skip_blocks")
    if config.scope != "module" and upstream.has_block_cache(model):
        # The cache compares the first block's output with the last one's: both must have the same, whole length.
        for index in (0, len(blocks) - 1):
            reasons.setdefault(index, "a block cache needs the first and the last block whole")
    return reasons


@dataclass(frozen=True)
class LateChanges:
    """Raises if the model was changed, also after `apply_toma`, in a way that is not allowed."""

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
                "a block cache was enabled after apply_toma, which skips steps too: switch the cache off, or call "
                "remove_toma, then apply_toma again with skip=None."
            )
        if self.merges_an_end and upstream.has_block_cache(model):
            raise RuntimeError(
                "a block cache was enabled after apply_toma, and in scopes 'block' and 'stage' it needs the first and "
                "the last block whole: call remove_toma, then apply_toma again with the cache on."
            )
        merges_whole_blocks = self.scope not in (None, "module")
        if merges_whole_blocks and torch.is_grad_enabled() and upstream.recomputes(model):
            raise RuntimeError(
                f"gradient checkpointing runs blocks a second time, which scope={self.scope!r} cannot follow: "
                "use scope='module', call disable_gradient_checkpointing, or run under torch.no_grad()."
            )


def compiled_blocks(model: nn.Module, adapter: Adapter | None = None) -> list[nn.Module]:
    """What is compiled block by block. The adapter is looked up if it is not given."""
    adapter = adapter or find_adapter(model)
    if adapter is None:
        repeated = getattr(model, "_repeated_blocks", None) or ()
        return [module for module in model.modules() if type(module).__name__ in repeated]
    blocks = [block.module for block in adapter.blocks(model)]
    return blocks + [module for module in model.modules() if type(module).__name__ == CONVOLUTIONAL_BLOCK]


def graphs_obstacle(model: nn.Module, adapter: Adapter | None = None) -> str | None:
    """Why a model cannot be captured as CUDA graphs, if so. The adapter is looked up if it is not given."""
    if upstream.has_block_cache(model):
        return "a block cache decides in every step what to run"
    if upstream.is_offloaded(model):
        return "weights are offloaded, and move while the model runs"
    adapter = adapter or find_adapter(model)
    return adapter.untraceable if adapter is not None else None
