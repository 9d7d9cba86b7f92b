"""Accelerates one clone of a ComfyUI model, and only while that clone samples.

Clones share their weights and modules. So the hooks are put into the modules when sampling begins, and taken out when
it ends, also by an interrupt. While they are in, calls that another clone makes are recognised and run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from toma_diffusion.api import apply_with
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.hooks.arguments import Arguments, Given, Keywords
from toma_diffusion.hooks.root import find_root
from toma_diffusion.hooks.sites import Hook
from toma_diffusion.integrations.comfyui import _comfy
from toma_diffusion.integrations.comfyui.adapters import ComfyAdapter, find_comfy_adapter, reason_to_refuse
from toma_diffusion.integrations.comfyui.adapters.base import transformer_options
from toma_diffusion.integrations.comfyui.place import PlaceReader, missing
from toma_diffusion.integrations.comfyui.report import MERGED, REUSED, WHOLE, Report, StepTimes

logger = logging.getLogger(__name__)


class Session:
    """A wrapper around the sampling of a clone (`WrappersMP.OUTER_SAMPLE`). Later clones of that clone share it."""

    def __init__(self, preset: str, overrides: Mapping[str, Any]) -> None:
        self.preset = preset
        self.overrides = dict(overrides)
        self.last: Report | str | None = None
        """What happened in the last sampling, or why nothing did; None before the first."""

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample."""
        patcher = executor.class_obj.model_patcher
        reason = reason_to_pass_through(patcher)
        if reason is not None:
            self.last = reason
            logger.warning("ToMA: not accelerated: %s", reason)
            return executor(*args, **kwargs)
        with self._hooks(_comfy.denoiser_of(patcher)):
            return executor(*args, **kwargs)

    def check(self, patcher: Any) -> None:
        """Raise now if the settings do not fit this model, not when it samples."""
        model = _comfy.denoiser_of(patcher)
        apply_with(_adapter_of(model), model, self.preset, self.overrides).remove()

    @contextmanager
    def _hooks(self, model: nn.Module) -> Iterator[None]:
        adapter = _adapter_of(model)
        reader = ReadCall(self, adapter)
        reader.bind(model)
        place = model.register_forward_pre_hook(reader, with_kwargs=True)
        try:
            handle = apply_with(adapter, model, self.preset, self.overrides)
            reader.handle = handle
            try:
                yield
                self.last = reader.report(interrupted=False)
            except BaseException:
                self.last = reader.report(interrupted=True)
                raise
            finally:
                handle.remove()
        finally:
            place.remove()


@dataclass(eq=False)
class ReadCall(Hook):
    """Forward pre-hook of the model, before all others: sets the step and the pass, or has the call run as it is."""

    session: Session
    adapter: ComfyAdapter
    handle: ToMAHandle | None = None
    places: PlaceReader = field(default_factory=PlaceReader)
    times: StepTimes = field(default_factory=StepTimes)
    notes: dict[str, None] = field(default_factory=dict)
    """In their order, each once."""
    _step: int | None = None
    _awaits_note: bool = False
    """Whether a call has begun of which it is not noted yet what it did."""

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Before the call."""
        handle = self.handle
        if handle is None:
            return
        self._note_last(module)
        given = Given(self.names, args, kwargs)
        reason = self._reason_to_leave_alone(module, given)
        if (reason is None) != handle.enabled:
            handle.enabled = reason is None
        if reason is not None:
            self.notes[f"calls ran as they are: {reason}"] = None
            return
        place = self.places.read(transformer_options(given))
        if place.begins:
            handle.begin(place.num_steps)
        if place.begins or place.step != self._step:
            self.times.begin_step()
        handle.step(place.step, place.ordinal, place.parts)
        self._step, self._awaits_note = place.step, True

    def report(self, *, interrupted: bool) -> Report:
        """What happened."""
        if self.handle is None:
            raise RuntimeError("nothing was applied yet.")
        self._note_last(self.handle.model)
        self.times.end()
        return Report(self.handle.summary(), self.times, tuple(self.notes), interrupted)

    def _reason_to_leave_alone(self, module: nn.Module, given: Given) -> str | None:
        options = transformer_options(given)
        if _comfy.wrapper_in(options) is not self.session:
            return "another clone of the model made them"
        if lacking := missing(options):
            return f"the sampler does not say in transformer_options which step it is ({', '.join(lacking)})"
        if options.get("context_window") is not None:
            return "context windows are not supported"
        return self.adapter.reason_to_leave_alone(module, given)

    def _note_last(self, module: nn.Module) -> None:
        """Note what the last call did."""
        root = find_root(module)
        if not self._awaits_note or root is None:
            return
        self._awaits_note = False
        state = root.state
        merges = state.active and any(not plan.is_identity for plan in state.current.values())
        self.times.note(REUSED if state.reusing else MERGED if merges else WHOLE)


def reason_to_pass_through(patcher: Any) -> str | None:
    """Why a clone is left as it is, if so."""
    model = _comfy.denoiser_of(patcher)
    if _comfy.is_compiled(patcher):
        return "torch.compile is not supported together with ToMA in ComfyUI: bypass one of the two nodes"
    if find_comfy_adapter(model) is None:
        return reason_to_refuse(model)
    if find_root(model) is not None:
        return "a clone of this model is sampling with ToMA already"
    return None


def _adapter_of(model: nn.Module) -> ComfyAdapter:
    adapter = find_comfy_adapter(model)
    if adapter is None:
        raise TypeError(reason_to_refuse(model))
    return adapter
