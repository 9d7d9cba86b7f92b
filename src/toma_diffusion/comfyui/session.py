"""Accelerates one clone of a ComfyUI model, and only while that clone samples.

Clones share their weights and modules. So the hooks are put into the modules when sampling begins, and taken out when
it ends, also by an interrupt. While they are in, calls that another clone makes are recognised and run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from toma_diffusion.api import apply_with
from toma_diffusion.comfyui import _comfy
from toma_diffusion.comfyui.families import find_comfy_adapter, reason_to_refuse
from toma_diffusion.comfyui.families.base import Options, transformer_options
from toma_diffusion.comfyui.place import Place, PlaceReader, missing
from toma_diffusion.comfyui.report import MERGED, SKIPPED, WHOLE, Report, StepTimes
from toma_diffusion.comfyui.solver import SEVERAL, read_levels, sampler_name
from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.engine.install import find_root
from toma_diffusion.errors import UsageError
from toma_diffusion.handle import ToMAHandle
from toma_diffusion.merge.config import ToMAConfig
from toma_diffusion.skip.denoiser import Skipper

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fitted:
    """The settings as a model and a sampler allow them."""

    overrides: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What is not done, and why."""
    obstacle: str | None = None
    """Why the model is left as it is, if so."""


class Session:
    """Accelerates the samplings of a clone. Later clones of that clone share it."""

    def __init__(self, preset: str, overrides: Mapping[str, Any]) -> None:
        self.preset = preset
        self.overrides = dict(overrides)
        self.last: Report | str | None = None
        """What happened in the last sampling, or why nothing did; None before the first."""
        self._running: Calls | None = None
        """While the clone samples."""

    def put(self, patcher: Any) -> None:
        """Accelerate a clone from now on."""
        _comfy.wrap_sampling(patcher, self, self.evaluate)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of a sampling (`OUTER_SAMPLE`)."""
        patcher = executor.class_obj.model_patcher
        sampler = sampler_name(_comfy.sampler_of(args, kwargs))
        fitted = self.fit(patcher, sampler)
        if fitted.obstacle is not None:
            self.last = fitted.obstacle
            logger.warning("ToMA: not accelerated: %s", fitted.obstacle)
            return executor(*args, **kwargs)
        with self._hooks(patcher, sampler, fitted):
            return executor(*args, **kwargs)

    def evaluate(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of an evaluation by the sampler (`PREDICT_NOISE`): all passes over the model that make one result."""
        if self._running is None:
            return executor(*args, **kwargs)
        return self._running.evaluate(partial(executor, *args, **kwargs))

    def fit(self, patcher: Any, sampler: str = "") -> Fitted:
        """Leave out of the settings what cannot be done. The sampler is not known before the clone samples."""
        model = _comfy.denoiser_of(patcher)
        if _comfy.is_compiled(patcher):
            return self._obstacle("torch.compile is not supported together with ToMA in ComfyUI: bypass one of the two")
        config = ToMAConfig.from_preset(self.preset, **self.overrides)
        cache = _comfy.cache_of(patcher) if config.skip is not None else None
        if cache is not None:
            return self._obstacle(f"{cache} skips steps already: bypass one of the two nodes")
        if find_root(model) is not None:
            return self._obstacle("a clone of this model is sampling with ToMA already")
        changes: dict[str, Any] = {}
        notes = []
        if config.ratio and find_comfy_adapter(model) is None:
            changes["ratio"] = 0.0
            notes.append(reason_to_refuse(model))
        if config.skip is not None and sampler in SEVERAL:
            changes["skip"] = None
            notes.append(f"the sampler {sampler} evaluates the model several times a step: nothing is skipped")
        config = config.changed(changes)
        does_nothing = not config.ratio and config.skip is None
        return Fitted(self.overrides | changes, tuple(notes), "; ".join(notes) if does_nothing else None)

    def check(self, patcher: Any) -> Fitted:
        """Raise now if the settings do not fit this model, not when it samples."""
        fitted = self.fit(patcher)
        model = _comfy.denoiser_of(patcher)
        adapter = find_comfy_adapter(model)
        if fitted.notes and (self.overrides.get("ratio") or "window" in self.overrides):
            raise UsageError(f"{reason_to_refuse(model)}. Leave ratio, start and end at -1.")
        if fitted.obstacle is None:
            apply_with(adapter, model, self.preset, fitted.overrides).remove()
        return fitted

    def _obstacle(self, reason: str) -> Fitted:
        return Fitted(self.overrides, obstacle=reason)

    @contextmanager
    def _hooks(self, patcher: Any, sampler: str, fitted: Fitted) -> Iterator[None]:
        model = _comfy.denoiser_of(patcher)
        handle = apply_with(find_comfy_adapter(model), model, self.preset, fitted.overrides)
        calls = Calls(self, handle, _comfy.model_sampling_of(patcher), sampler)
        calls.notes.update(dict.fromkeys(fitted.notes))
        try:
            calls.put()
            self._running = calls
            yield
            self.last = calls.report(interrupted=False)
        except BaseException:
            self.last = calls.report(interrupted=True)
            raise
        finally:
            self._running = None
            handle.remove()


@dataclass(eq=False)
class Calls(Hook):
    """Runs before every call of the model: sets the step and the pass, or has the call run as it is."""

    session: Session
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
    _kinds: set[str] = field(default_factory=set)
    """What the calls of this evaluation did."""
    _computed_passes: set[int] = field(default_factory=set)
    """Those of the last evaluation that was computed."""
    _has_repeated: bool = False
    """Whether the sampler has evaluated the model twice in a step."""

    def __post_init__(self) -> None:
        root = find_root(self.handle.model)
        assert root is not None  # it is there until the handle is removed
        self.root = root
        self.skipper = root.outermost if isinstance(root.outermost, Skipper) else None

    def put(self) -> None:
        """Put it in. If steps are skipped, it must be outside of what skips them: hooks do not run in such a step."""
        model = self.handle.model
        self.bind(model)
        if self.skipper is not None:
            self.skipper.before = partial(self, model)
        else:
            model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def evaluate(self, run: Callable[[], Any]) -> Any:
        """Evaluate the model. If a step is skipped that has other passes than the last computed one, it is computed.

        Conditionings begin and end half-way, and with little memory ComfyUI makes several calls in the place of one.
        Guidance must not compare a predicted pass with a computed one, nor use the outputs of another pass.
        """
        self._kinds = set()
        self.places.begin_evaluation()
        result = run()
        self._note_last()
        if self.skipper is not None and SKIPPED in self._kinds:
            if self._kinds == {SKIPPED} and self.places.passes == self._computed_passes:
                return result
            self._kinds = set()
            self.places.repeat_evaluation()
            self.times.repeat_step()
            assert self._step is not None  # that of the calls just made
            self.skipper.compute_again(self._step)
            result = run()
            self._note_last()
        self._computed_passes = self.places.passes
        return result

    def __call__(self, module: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        """Before the call."""
        self._note_last()
        options = transformer_options(Given(self.names, args, kwargs))
        reason = self._reason_to_leave_alone(options)
        # Not by the handle, which forgets what earlier steps returned.
        self.root.state.enabled = reason is None
        if reason is not None:
            self.notes[f"calls ran as they are: {reason}"] = None
            return
        place = self.places.read(options)
        self._begin(place)
        self.handle.step(place.step, place.ordinal, place.parts)
        self._step, self._awaits_note = place.step, True

    def report(self, *, interrupted: bool) -> Report:
        """What happened."""
        self._note_last()
        self.times.end()
        return Report(self.handle.summary(), self.times, tuple(self.notes), interrupted)

    def _begin(self, place: Place) -> None:
        """Begin the generation or the step, if the call is the first of it."""
        if place.begins:
            levels = read_levels(self.model_sampling, self.places.levels, self.sampler)
            self.handle.begin(place.num_steps, levels)
        if place.begins or place.step != self._step:
            self.times.begin_step()
        if self.skipper is None:
            return
        if place.repeats:
            self._has_repeated = True
            why = f"the sampler {self.sampler} evaluates the model several times a step"
            self.notes[f"{why}: nothing more is skipped"] = None
        if self._has_repeated:
            self.skipper.compute_again(place.step)

    def _reason_to_leave_alone(self, options: Options) -> str | None:
        if _comfy.wrapper_in(options) is not self.session:
            return "another clone of the model made them"
        if lacking := missing(options):
            return f"the sampler does not say in transformer_options which step it is ({', '.join(lacking)})"
        if options.get("context_window") is not None:
            return "context windows are not supported"
        return None

    def _note_last(self) -> None:
        """Note what the last call did."""
        if not self._awaits_note:
            return
        self._awaits_note = False
        state = self.root.state
        if self.skipper is not None and not self.skipper.is_computing:
            kind = SKIPPED
        else:
            merges = state.active and any(not plan.is_identity for plan in state.current.values())
            kind = MERGED if merges else WHOLE
        self._kinds.add(kind)
        self.times.note(kind)
