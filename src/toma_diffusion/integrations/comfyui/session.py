"""Accelerates one clone of a ComfyUI model, and only while that clone samples.

Clones share their weights and modules. So the hooks are put into the modules when sampling begins, and taken out when
it ends, also by an interrupt. While they are in, calls that another clone makes are recognised and run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from toma_diffusion.api import apply_with
from toma_diffusion.config import ToMAConfig
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.hooks.arguments import Arguments, Given, Keywords
from toma_diffusion.hooks.root import RootHook, find_root
from toma_diffusion.hooks.sites import Hook
from toma_diffusion.integrations.comfyui import _comfy
from toma_diffusion.integrations.comfyui.adapters import ComfyAdapter, find_comfy_adapter, reason_to_refuse
from toma_diffusion.integrations.comfyui.adapters.base import transformer_options
from toma_diffusion.integrations.comfyui.place import Place, PlaceReader, missing, num_steps
from toma_diffusion.integrations.comfyui.report import MERGED, SKIPPED, WHOLE, Report, StepTimes
from toma_diffusion.integrations.comfyui.solver import SEVERAL, read_levels, sampler_name
from toma_diffusion.skip.denoiser import Skipper

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """The settings as a model and a sampler allow them."""

    overrides: Mapping[str, Any]
    notes: tuple[str, ...]
    """What is not done, and why."""
    obstacle: str | None
    """Why the model is left as it is, if so."""


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
        sampler = sampler_name(_comfy.sampler_of(args, kwargs))
        fitted = self.fit(patcher, sampler)
        if fitted.obstacle is not None:
            self.last = fitted.obstacle
            logger.warning("ToMA: not accelerated: %s", fitted.obstacle)
            return executor(*args, **kwargs)
        with self._hooks(patcher, sampler, fitted):
            return executor(*args, **kwargs)

    def fit(self, patcher: Any, sampler: str = "") -> Fitted:
        """Leave out of the settings what cannot be done. The sampler is not known before the clone samples."""
        model = _comfy.denoiser_of(patcher)
        config = ToMAConfig.from_preset(self.preset, **self.overrides)
        changes: dict[str, Any] = {}
        notes = []
        if config.ratio and find_comfy_adapter(model) is None:
            changes["ratio"] = 0.0
            notes.append(reason_to_refuse(model))
        if config.skip is not None and sampler in SEVERAL:
            changes["skip"] = None
            notes.append(f"the sampler {sampler} evaluates the model several times a step: nothing is skipped")
        config = config.changed(changes)
        cache = _comfy.cache_of(patcher) if config.skip is not None else None
        obstacle = None
        if _comfy.is_compiled(patcher):
            obstacle = "torch.compile is not supported together with ToMA in ComfyUI: bypass one of the two nodes"
        elif cache is not None:
            obstacle = f"{cache} skips steps already: bypass one of the two nodes"
        elif notes and not config.ratio and config.skip is None:
            obstacle = "; ".join(notes)
        elif find_root(model) is not None:
            obstacle = "a clone of this model is sampling with ToMA already"
        return Fitted(self.overrides | changes, tuple(notes), obstacle)

    def check(self, patcher: Any) -> None:
        """Raise now if the settings do not fit this model, not when it samples."""
        model = _comfy.denoiser_of(patcher)
        apply_with(find_comfy_adapter(model), model, self.preset, self.fit(patcher).overrides).remove()

    @contextmanager
    def _hooks(self, patcher: Any, sampler: str, fitted: Fitted) -> Iterator[None]:
        model = _comfy.denoiser_of(patcher)
        adapter = find_comfy_adapter(model)
        handle = apply_with(adapter, model, self.preset, fitted.overrides)
        reader = ReadCall(self, adapter, handle, _comfy.model_sampling_of(patcher), sampler)
        reader.notes.update(dict.fromkeys(fitted.notes))
        try:
            reader.put()
            yield
            self.last = reader.report(interrupted=False)
        except BaseException:
            self.last = reader.report(interrupted=True)
            raise
        finally:
            handle.remove()


@dataclass(eq=False)
class ReadCall(Hook):
    """Runs before every call of the model: sets the step and the pass, or has the call run as it is."""

    session: Session
    adapter: ComfyAdapter | None
    handle: ToMAHandle
    model_sampling: Any
    sampler: str
    places: PlaceReader = field(default_factory=PlaceReader)
    times: StepTimes = field(default_factory=StepTimes)
    notes: dict[str, None] = field(default_factory=dict)
    """In their order, each once."""
    _step: int | None = None
    _awaits_note: bool = False
    """Whether a call has begun of which it is not noted yet what it did."""
    _skipped: int = 0
    """How many steps of this generation were skipped."""
    _has_repeated: bool = False
    """Whether the sampler has evaluated the model twice in a step."""

    def put(self) -> None:
        """Put it in. If steps are skipped, it must be outside of what skips them: hooks do not run in such a step."""
        model, skipper = self.handle.model, self._skipper
        self.bind(model)
        if skipper is not None:
            skipper.before = partial(self, model)
        else:
            model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Before the call."""
        self._note_last()
        given = Given(self.names, args, kwargs)
        reason = self._reason_to_leave_alone(module, given)
        # Not by the handle, which forgets what earlier steps returned.
        self._root.state.enabled = reason is None
        if reason is not None:
            self.notes[f"calls ran as they are: {reason}"] = None
            return
        place = self.places.read(transformer_options(given))
        self._begin(place)
        self.handle.step(place.step, place.ordinal, place.parts)
        self._step, self._awaits_note = place.step, True

    def report(self, *, interrupted: bool) -> Report:
        """What happened."""
        self._note_last()
        self.times.end()
        return Report(self.handle.summary(), self.times, tuple(self.notes), interrupted)

    @property
    def _root(self) -> RootHook:
        root = find_root(self.handle.model)
        assert root is not None  # it is there until the handle is removed
        return root

    @property
    def _skipper(self) -> Skipper | None:
        outermost = self._root.outermost
        return outermost if isinstance(outermost, Skipper) else None

    def _begin(self, place: Place) -> None:
        """Begin the generation or the step, if the call is the first of it."""
        skipper = self._skipper
        if place.begins:
            levels = None if skipper is None else read_levels(self.model_sampling, self.places.levels, self.sampler)
            self.handle.begin(place.num_steps, levels)
            self._skipped = 0
        if place.begins or place.step != self._step:
            self.times.begin_step()
        if skipper is None:
            return
        if place.repeats:
            self._has_repeated = True
            why = f"the sampler {self.sampler} evaluates the model several times a step"
            self.notes[f"{why}: nothing more is skipped"] = None
        if self._has_repeated:
            skipper.generation = replace(skipper.generation, computed=None)

    def _reason_to_leave_alone(self, module: nn.Module, given: Given) -> str | None:
        options = transformer_options(given)
        if _comfy.wrapper_in(options) is not self.session:
            return "another clone of the model made them"
        if lacking := missing(options):
            return f"the sampler does not say in transformer_options which step it is ({', '.join(lacking)})"
        if options.get("context_window") is not None:
            return "context windows are not supported"
        if self.adapter is None or not self._merges(num_steps(options["sample_sigmas"])):
            return None
        return self.adapter.reason_to_leave_alone(module, given)

    def _merges(self, count: int) -> bool:
        """Whether tokens are merged in a generation of so many steps."""
        state = self._root.state
        return bool(state.slots) and state.schedule.merges(count)

    def _note_last(self) -> None:
        """Note what the last call did."""
        if not self._awaits_note:
            return
        self._awaits_note = False
        root = self._root
        skipped = 0 if root.outermost is None else root.outermost.counts[1]
        merges = root.state.active and any(not plan.is_identity for plan in root.state.current.values())
        self.times.note(SKIPPED if skipped > self._skipped else MERGED if merges else WHOLE)
        self._skipped = skipped
