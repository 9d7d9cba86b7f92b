"""Makes one clone of a ComfyUI model faster, and only while that clone samples.

Clones share their weights and modules. So the hooks are put into the modules when sampling begins, and taken out when
it ends, also by an interrupt. While they are in, calls that another clone makes are recognised and run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from toma_diffusion.api import speed_up_model
from toma_diffusion.comfyui import upstream
from toma_diffusion.comfyui.families import find_comfy_family
from toma_diffusion.comfyui.families.base import Options, transformer_options
from toma_diffusion.comfyui.place import Place, PlaceReader, missing
from toma_diffusion.comfyui.report import MERGED, SKIPPED, WHOLE, Report, StepTimes, described
from toma_diffusion.comfyui.solver import SEVERAL, read_levels
from toma_diffusion.engine.arguments import Arguments, Given, Keywords
from toma_diffusion.engine.hooks import Hook
from toma_diffusion.engine.install import find_root
from toma_diffusion.errors import UsageError
from toma_diffusion.handle import Handle
from toma_diffusion.merge.state import MergeState
from toma_diffusion.presets import Chosen
from toma_diffusion.skip.denoiser import Skipper

logger = logging.getLogger(__name__)


class Acceleration:
    """What our nodes chose for a clone. Later clones of that clone share it."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.last: Report | str | None = None
        """What happened in the last sampling, or why nothing did; None before the first."""
        self._running: Calls | None = None
        """While the clone samples."""

    def put(self, patcher: Any) -> None:
        upstream.wrap_sampling(patcher, self, self.evaluate)

    def check(self, patcher: Any) -> str:
        """Raise `UsageError` now, not when it samples, if this does not fit the model. Returns what will be done."""
        if obstacle := self.obstacle(patcher):
            raise UsageError(f"{obstacle}.")
        with self.handle(patcher) as handle:
            return "\n".join(described(handle.summary()))

    def obstacle(self, patcher: Any) -> str | None:
        """Why nothing can be done with this clone as it is now, if so."""
        if upstream.is_compiled(patcher):
            return "torch.compile is not supported together with ToMA in ComfyUI: bypass one of the two nodes"
        cache = upstream.cache_of(patcher) if self.chosen.ever_skips else None
        if cache is not None:
            return f"{cache} skips steps already: bypass one of the two nodes"
        if find_root(upstream.denoiser_of(patcher)) is not None:
            return "a clone of this model is sampling with ToMA already"
        return None

    def handle(self, patcher: Any) -> Handle:
        model = upstream.denoiser_of(patcher)
        return speed_up_model(find_comfy_family(model), model, self.chosen)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of a sampling (`OUTER_SAMPLE`)."""
        patcher = executor.class_obj.model_patcher
        obstacle = self.obstacle(patcher)  # nodes after ours may have changed the clone
        if obstacle is not None:
            self.last = f"Not accelerated: {obstacle}."
            logger.warning("ToMA: not accelerated: %s", obstacle)
            return executor(*args, **kwargs)
        with self.handle(patcher) as handle:
            sampler = upstream.sampler_name(args, kwargs)
            calls = Calls(self, handle, patcher.get_model_object("model_sampling"), sampler)
            interrupted = True
            try:
                calls.put()
                self._running = calls
                result = executor(*args, **kwargs)
                interrupted = False
            finally:
                self._running = None
                self.last = calls.report(interrupted)
        return result

    def evaluate(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrapper of an evaluation by the sampler (`PREDICT_NOISE`): all passes over the model that make one result."""
        if self._running is None:
            return executor(*args, **kwargs)
        return self._running.evaluate(partial(executor, *args, **kwargs))


@dataclass(eq=False)
class Calls(Hook):
    """Runs before every call of the model: sets the step and the pass, or has the call run as it is."""

    acceleration: Acceleration
    handle: Handle
    model_sampling: Any
    sampler: str
    places: PlaceReader = field(default_factory=PlaceReader)
    times: StepTimes = field(default_factory=StepTimes)
    notes: dict[str, None] = field(default_factory=dict)
    """In their order, each once."""

    def __post_init__(self) -> None:
        root = find_root(self.handle.model)
        assert root is not None  # it is there until the handle is removed
        self.session, self.inside = root.session, root.inside
        self.skipper = root.outermost if isinstance(root.outermost, Skipper) else None
        self._step: int | None = None
        self._awaits_note = False
        """Whether a call has begun of which it is not noted yet what it did."""
        self._kinds: set[str] = set()
        """What the calls of this evaluation did."""
        self._computed_passes: set[int] = set()
        """Those of the last evaluation that was computed."""
        self._repeats = False
        """Whether the sampler evaluates the model several times in a step. Then nothing is skipped."""
        if self.sampler in SEVERAL:
            self._note_repeats("nothing")

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
        self._note_last()
        options = transformer_options(Given(self.names, args, kwargs))
        reason = self._reason_to_leave_whole(options)
        # Not by the handle, which forgets what earlier steps returned.
        self.session.enabled = reason is None
        if reason is not None:
            self.notes[f"calls ran as they are: {reason}"] = None
            return
        place = self.places.read(options)
        self._begin(place)
        self.handle.step(place.step, place.pass_index, place.parts)
        self._step, self._awaits_note = place.step, True

    def report(self, interrupted: bool) -> Report:
        self._note_last()
        self.times.end()
        self.session.enabled = True  # whatever the last call was
        return Report(self.handle.summary(), self.times, tuple(self.notes), interrupted)

    def _begin(self, place: Place) -> None:
        """Begin the generation or the step, if the call is the first of it."""
        if place.begins:
            self.handle.begin(place.num_steps, read_levels(self.model_sampling, self.places.levels, self.sampler))
        if place.begins or place.step != self._step:
            self.times.begin_step()
        if place.repeats and not self._repeats:
            self._note_repeats("nothing more")
        if self.skipper is not None and self._repeats:
            self.skipper.compute_again(place.step)

    def _note_repeats(self, what: str) -> None:
        self._repeats = True
        if self.skipper is not None:
            why = f"the sampler {self.sampler} evaluates the model several times a step"
            self.notes[f"{why}: {what} is skipped"] = None

    def _reason_to_leave_whole(self, options: Options) -> str | None:
        if upstream.wrapper_in(options.get("wrappers")) is not self.acceleration:
            return "another clone of the model made them"
        if lacking := missing(options):
            return f"the sampler does not say in transformer_options which step it is ({', '.join(lacking)})"
        if options.get("context_window") is not None:
            return "context windows are not supported"
        return None

    def _note_last(self) -> None:
        if not self._awaits_note:
            return
        self._awaits_note = False
        state = self.inside
        if self.skipper is not None and not self.skipper.is_computing:
            kind = SKIPPED
        elif isinstance(state, MergeState) and state.active and not state.merges_nothing:
            kind = MERGED
        else:
            kind = WHOLE
        self._kinds.add(kind)
        self.times.note(kind)
