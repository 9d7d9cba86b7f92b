"""Stands in front of a denoiser: runs it in the steps that are computed, and predicts its output in the others.

`nn.Module.__call__` calls it in the place of everything else. So it is outside hooks: offloaded weights are not moved
in a skipped step. It is outside `torch.compile`: compiled code is not entered. And it is outside context parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from toma_diffusion.engine.arguments import Given, parameter_names
from toma_diffusion.engine.clock import Identity, Tick, running_pipeline
from toma_diffusion.engine.compile import skip_frames
from toma_diffusion.engine.hooks import Hook, remove_hooks
from toma_diffusion.engine.install import refuse_export
from toma_diffusion.engine.session import Session
from toma_diffusion.errors import UsageError
from toma_diffusion.skip import controlnet, front, prior
from toma_diffusion.skip.config import BySteps, Skip
from toma_diffusion.skip.front import Front
from toma_diffusion.skip.history import History, Seen
from toma_diffusion.skip.learned import Learned, LearnedSteps, Weights
from toma_diffusion.skip.levels import Levels, read_levels
from toma_diffusion.skip.schedule import computed_steps

SAME_ANGLE = 0.02
"""Noise levels that differ by less, in radians, are the same for weights that were learned."""
NAMED = "cache_context"
"""How diffusers' pipelines name the passes over a step: `with transformer.cache_context("cond"):`."""


class Recorder(Protocol):
    """Gets what goes into every call and what comes out, while the denoiser is learned from."""

    def note(self, model: nn.Module, tick: Tick, seen: Seen, output: Any) -> None:
        """A call, and what it returned, computed or predicted."""

    @property
    def wants_all(self) -> bool:
        """Whether every step is to be computed."""


@dataclass(frozen=True)
class Generation:
    """What is settled when a generation begins."""

    number: int = 0
    num_steps: int | None = None
    levels: Levels | None = None
    computed: tuple[int, ...] | None = None
    """The steps that are computed; None: all."""
    learned: LearnedSteps | None = None
    """How the others are predicted, if it was learned."""
    scheduler: str = ""
    """The name of its class, if it is known."""
    guidance: float | None = None
    skip: Skip | None = None
    """The settings."""

    def computes(self, step: int) -> bool:
        """Whether the plan is to run the denoiser in that step."""
        beyond = self.num_steps is not None and step >= self.num_steps
        return self.computed is None or beyond or step in self.computed


@dataclass(frozen=True)
class SkipSummary:
    """What is skipped: as it was in the last generation, or as planned."""

    num_computed: int
    """Steps of the last generation that were computed; 0 before the first."""
    num_predicted: int
    computed: tuple[int, ...] | None
    """Which steps of the last generation were to be computed; None: all."""
    num_bytes: int
    """Memory held by the outputs that skipped steps are predicted from."""
    lines: tuple[str, ...]
    """In plain words."""


class Skipper(Front):
    """The call of one denoiser.

    Args:
        model: the denoiser.
        by_steps: the settings, by the number of steps.
        session: the request in progress.
    """

    def __init__(self, model: nn.Module, by_steps: BySteps, session: Session) -> None:
        super().__init__(model)
        self.by_steps, self.session = by_steps, session
        self.names = parameter_names(model)
        self.controlnets: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """That do not run in skipped steps either."""
        self.pass_name: str | None = None
        """Of the pass that is running, if the pipeline says it."""
        self.recorder: Recorder | None = None
        self.before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        """Runs first in every call: a program with models of its own sets the step there."""
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("model", "by_steps", "session")
        }  # a copy begins a new generation

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
        keep_out_of_graphs()  # a pickled model may be loaded in a process that has not skipped anything yet

    def put(self) -> None:
        """Take the place of the model's call, also if something else has taken it since."""
        super().put()
        if hasattr(type(self.model), NAMED) and not isinstance(vars(self.model).get(NAMED), NamedPasses):
            setattr(self.model, NAMED, NamedPasses(self))
        self._put_before(self.session.steps.pipeline)

    def take_out(self) -> None:
        """Put back what was there before."""
        super().take_out()
        if isinstance(vars(self.model).get(NAMED), NamedPasses):
            delattr(self.model, NAMED)
        for net in self.controlnets:
            controlnet.take_out(net, self)
        self.controlnets.clear()

    def forget(self) -> None:
        """Forget all outputs. The next step is computed."""
        self.generation = Generation()
        self.counts = (0, 0)
        """How many steps of the current or the last generation were computed, and in how many a pass was predicted."""
        self._histories: dict[Hashable, History] = {}
        self._passes = 0
        """Over the first step of the generation."""
        self._computed_steps: set[int] = set()
        self._predicted_steps: set[int] = set()
        self._step = -1
        self._is_computing = True
        """Whether the remaining passes over this step are computed."""
        self._must_compute = False
        """Whether the next step is, because a pass over this one had nothing to predict from."""
        self._last_computed = -1
        self._named: dict[str | None, int] = {}
        """How many passes over this step had that name."""

    @property
    def is_computing(self) -> bool:
        """Whether the denoiser ran in the last call, or runs in this one."""
        return self._is_computing

    @property
    def num_bytes(self) -> int:
        """Memory held by outputs."""
        calls = [call for net in self.controlnets if (call := controlnet.call_of(net)) is not None]
        return sum(each.num_bytes for each in self._histories.values()) + sum(each.num_bytes for each in calls)

    def answer(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call returns: computed or predicted. `run` runs the denoiser."""
        refuse_export(self.model)
        if self.before is not None:
            self.before(args, kwargs)
        call, predicted = self.begin(args, kwargs)
        if call is None:
            return predicted
        try:
            output = run(*args, **kwargs)
        finally:
            self.session.tick = None
        return self.end(call, output)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call | None, Any]:
        """Before a call. Returns None and the predicted output if the denoiser need not run."""
        seen = Seen.of(Given(self.names, args, kwargs))
        if seen is None:
            raise UsageError(
                f"no noisy sample was found among the arguments of {type(self.model).__name__}, so its output cannot "
                "be predicted: use skip=None."
            )
        session = self.session
        tick = session.tick = session.steps.read(self.model, seen.sample, seen.conditioning, seen.timestep, seen.batch)
        if not session.enabled:
            return _Call(tick, None, seen), None
        if tick.generation != self.generation.number:
            self._begin_generation(tick)
        key = self._key_of(tick)
        history = self._history(key, seen)
        if tick.step != self._step:
            self._step = tick.step
            self._is_computing = self._must_compute or self.generation.computes(tick.step)
            self._must_compute = False
        if not self._is_computing and (history is None or history.steps[0] != self._last_computed):
            self._is_computing = True
            self._must_compute = tick.step in self._predicted_steps
        call = _Call(tick, key, seen)
        if self._is_computing or history is None:
            return call, None
        if torch.is_grad_enabled() and seen.sample.requires_grad:
            session.tick = None
            raise RuntimeError(
                "a skipped step has no gradient: run under torch.no_grad(), or switch handle.enabled off."
            )
        session.tick = None
        self._check_passes()
        self._count(tick.step, self._predicted_steps)
        predicted = history.predict(self._weights(tick, history), seen)
        if self.recorder is not None:
            self.recorder.note(self.model, tick, seen, predicted)
        return None, predicted

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part in a call that has begun without it: a copied model makes such a one. It cannot be skipped."""
        self._must_compute = True
        self._step = -1
        call, _ = self.begin(args, kwargs)
        if call is not None:
            self.model.register_forward_hook(EndCall(self, call), with_kwargs=True)

    def compute_again(self, step: int) -> None:
        """Compute all passes over this step that are still to come, also if it was predicted already."""
        if step != self._step:
            self._must_compute = True
            return
        self._is_computing, self._must_compute = True, False
        self._predicted_steps.discard(step)

    def will_skip(self, timestep: Any) -> bool | None:
        """Whether the denoiser will not run in the step of this timestep, as far as is known before its first pass.

        None if it is no step of the generation in progress.
        """
        step = self.session.steps.foresee(self.model, timestep)
        if step is None:
            return None
        if not self.session.enabled or self.generation.number != self.session.steps.generation:
            return False
        if step == self._step:
            return not self._is_computing
        if self._must_compute or self.generation.computes(step):
            return False
        return any(history.steps[0] == self._last_computed for history in self._histories.values())

    def summary(self) -> SkipSummary:
        """Which steps are computed, and how the others are predicted."""
        computed, predicted = self.counts
        lines = describe(self.by_steps, self.generation, self.counts, self.num_bytes)
        return SkipSummary(computed, predicted, self.generation.computed, self.num_bytes, lines)

    def acts_in(self, num_steps: int) -> bool:
        """Whether any of so many steps is skipped."""
        skip = self.by_steps(num_steps)
        return skip is not None and skip.count(num_steps) < num_steps

    def why_idle(self, num_steps: int) -> str:
        """The setting because of which all of so many steps are computed."""
        skip = self.by_steps(num_steps)
        return "this preset" if skip is None else f"computed={skip.computed}"

    def end(self, call: _Call, output: Any) -> Any:
        """After the denoiser has run. Returns its output, corrected if that was learned."""
        tick, key, seen = call.tick, call.key, call.seen
        if key is None or not self.session.enabled:
            return output
        self._last_computed = tick.step
        self._count(tick.step, self._computed_steps)
        if tick.step == 0:
            self._passes = max(self._passes, (tick.ordinal + 1) * tick.parts)
        if self.recorder is not None:
            self.recorder.note(self.model, tick, seen, output)
        if self.generation.computed is None:
            return output  # nothing will be predicted
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            history = self._histories[key] = History(seen.shapes)
        history.conditioning = Identity(seen.conditioning)
        learned, levels = self.generation.learned, self.generation.levels
        depth, keeps_sample = prior.needs(levels)
        if learned is not None:
            depth, keeps_sample = max(depth, learned.depth), keeps_sample or learned.needs_last_sample
        history.keep(tick.step, output, seen, depth, keeps_sample)
        weights = self._learned_weights(tick, history)
        has_gradient = torch.is_grad_enabled() and seen.sample.requires_grad
        return output if weights is None or has_gradient else history.predict(weights, seen)

    def _begin_generation(self, tick: Tick) -> None:
        recorder, running = self.recorder, running_pipeline(self.model)
        must_compute = self._must_compute
        self.forget()
        self._must_compute = must_compute
        num_steps = tick.num_steps
        skip = self.by_steps(num_steps)
        if skip is not None and num_steps is None and not isinstance(skip.computed, tuple):
            raise RuntimeError(
                f"computed={skip.computed} needs the number of steps, which is not known here. Call "
                "handle.begin(num_steps) before a generation and handle.step(i) before each step, run the model inside "
                "a pipeline, or say which steps are computed."
            )
        scheduler, first = self.session.steps.scheduler, self.session.steps.first
        eta = 0.0 if running is None else float(running.variables.get("eta") or 0.0)
        levels = None
        if scheduler is not None and num_steps is not None:
            levels = read_levels(scheduler, first, num_steps, eta, type(self.model).__name__)
        if running is not None:
            self._put_before(running.pipeline)
        teaches = recorder is not None and recorder.wants_all and num_steps is not None
        learned = None
        guidance = None if running is None else running.guidance
        computed: Any = None
        if skip is not None and not teaches:
            if skip.learned is not None:
                check_learned(skip.learned, type(self.model).__name__, num_steps, scheduler, guidance, levels)
                learned = skip.learned.of(skip.count(skip.learned.num_steps))
            computed = skip.computed if num_steps is None else computed_steps(skip, num_steps, levels)
            computed = None if len(computed) == num_steps else computed
        name = "" if scheduler is None else type(scheduler).__name__
        self.generation = Generation(tick.generation, num_steps, levels, computed, learned, name, guidance, skip)
        self.session.computed = tuple(range(num_steps or 0)) if teaches else self.generation.computed

    def _key_of(self, tick: Tick) -> Hashable:
        """Which pass it is: by the pipeline's name for it, or by its place among the passes over the step."""
        if tick.step != self._step or tick.ordinal == 0:
            self._named.clear()
        if self.pass_name is None or self.session.steps.has_ordinal:
            return tick.ordinal
        number = self._named[self.pass_name] = self._named.get(self.pass_name, -1) + 1
        return self.pass_name, number

    def _history(self, key: Hashable, seen: Seen) -> History | None:
        """The outputs of this pass; None if there are none that fit."""
        history = self._histories.get(key)
        if history is None or history.shapes != seen.shapes:
            return None
        if not history.conditioning.holds(seen.conditioning):
            others = [each for each in self._histories.values() if each.conditioning.holds(seen.conditioning)]
            if others or not history.conditioning.is_gone:
                return None  # passes have changed places
        return history

    def _weights(self, tick: Tick, history: History) -> Sequence[Weights]:
        """For the passes that make up the batch."""
        weights = self._learned_weights(tick, history)
        return [prior.predicted(self.generation.levels, history.steps, tick.step)] if weights is None else weights

    def _learned_weights(self, tick: Tick, history: History) -> Sequence[Weights] | None:
        """None if none were learned for this step, or if other steps than planned were computed before."""
        learned = self.generation.learned
        if learned is None or tick.step not in learned.weights:
            return None
        first = tick.ordinal * tick.parts
        weights = learned.weights[tick.step][first : first + tick.parts]
        depth = max((len(each.outputs) for each in weights), default=0)
        expected = tuple(each for each in reversed(learned.computed) if each <= tick.step)[:depth]
        return weights if len(weights) == tick.parts and history.steps[:depth] == expected else None

    def _check_passes(self) -> None:
        skip = self.generation.skip
        learned = None if skip is None or self.generation.learned is None else skip.learned
        wanted = 0 if learned is None else learned.passes
        if wanted and self._passes and self._passes != wanted:
            raise UsageError(
                f"the weights of skipped steps were learned for {wanted} passes over a step, and this generation has "
                f"{self._passes}: guide it as it was learned, or learn again with handle.learn or `toma learn`."
            )

    def _put_before(self, pipeline: Any) -> None:
        net = controlnet.put_before(pipeline, self)
        if net is not None:
            self.controlnets.add(net)

    def _count(self, step: int, steps: set[int]) -> None:
        steps.add(step)
        self.counts = (len(self._computed_steps - self._predicted_steps), len(self._predicted_steps))


@dataclass(frozen=True)
class _Call:
    """A call that the denoiser must run for."""

    tick: Tick
    key: Hashable
    """None if nothing is kept of it."""
    seen: Seen


@dataclass(eq=False)
class EndCall(Hook):
    """Forward hook of a call that began without the skipper: hands it the output, once."""

    before = False

    skipper: Skipper
    call: _Call

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the denoiser has run."""
        remove_hooks(module, lambda hook: hook is self)
        self.skipper.session.tick = None
        return self.skipper.end(self.call, output)


@dataclass(eq=False)
class NamedPasses:
    """`cache_context` of a denoiser: notes the name of the pass, and does what it did before."""

    skipper: Skipper

    @contextmanager
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """For the duration of a `with` block."""
        skipper = self.skipper
        before, skipper.pass_name = skipper.pass_name, name
        try:
            with getattr(type(skipper.model), NAMED)(skipper.model, name, *args, **kwargs):
                yield
        finally:
            skipper.pass_name = before


USUAL_STEPS = 20
"""What presets are described for before a generation has told its number of steps."""


def describe(by_steps: BySteps, generation: Generation, counts: tuple[int, int], num_bytes: int) -> tuple[str, ...]:
    """What is skipped, in lines: as planned, or as it was in the last generation."""
    computed, predicted = counts
    skip = generation.skip
    if not computed:
        return _planned(by_steps)
    if not predicted or skip is None:
        return (f"all {computed} steps of the last generation were computed",)
    which = "" if generation.computed is None else f" ({', '.join(map(str, generation.computed))})"
    return (
        f"{computed} of {computed + predicted} steps were computed{which}, {predicted} skipped and predicted",
        _prediction(skip, generation),
        f"the outputs that are kept take {num_bytes / 2**20:.1f} MiB",
    )


def _planned(by_steps: BySteps) -> tuple[str, ...]:
    skip = by_steps(USUAL_STEPS)
    if skip is None:
        return ()
    others = "the others are skipped and predicted"
    if isinstance(skip.computed, tuple):
        return (f"steps {', '.join(map(str, skip.computed))} are computed, {others}",)
    count = skip.count(USUAL_STEPS)
    return (f"{count} of {USUAL_STEPS} steps are computed, {USUAL_STEPS - count} skipped and predicted",)


def _prediction(skip: Skip, generation: Generation) -> str:
    if skip.learned is not None:
        return "predicted with weights that were learned on the model"
    if generation.levels is None:
        return "predicted: the last output as it was, because the noise levels of this scheduler are not known"
    if generation.levels.holds_image:
        return "predicted: the clean image stays as the last computed step saw it"
    return "predicted: noise and clean image stay nearly as the last computed step saw them"


def check_learned(
    learned: Learned,
    model_class: str,
    num_steps: int | None,
    scheduler: Any,
    guidance: float | None,
    levels: Levels | None,
) -> None:
    """Raise `UsageError` if something was learned for another model, or for another kind of generation."""
    found = {
        "model": (learned.model_class, model_class),
        "number of steps": (learned.num_steps, num_steps),
        "scheduler": (learned.scheduler, learned.scheduler if scheduler is None else type(scheduler).__name__),
        "guidance scale": (learned.guidance, learned.guidance if guidance is None else guidance),
    }
    differs = [f"{what} {now!r}, not {wanted!r}" for what, (wanted, now) in found.items() if now != wanted]
    if not differs and levels is not None and not _are_near(levels.angles, learned.angles):
        differs = ["other noise levels, because of the size of the picture or a setting of the scheduler"]
    if differs:
        raise UsageError(
            f"the weights of skipped steps were learned for other generations: this one has {' and '.join(differs)}. "
            "Generate as they were learned, or learn again with handle.learn or `toma learn`."
        )


def _are_near(ones: Sequence[float], others: Sequence[float]) -> bool:
    """Whether noise levels are the same for our purpose. What is not known is."""
    if not ones or not others:
        return True
    return all(abs(one - other) < SAME_ANGLE for one, other in zip(ones, others, strict=False))


@cache
def keep_out_of_graphs() -> None:
    """Exclude the call from graphs, but not the denoiser that it runs."""
    front.keep_out_of_graphs()
    controlnet.keep_out_of_graphs()
    EndCall.__call__ = torch.compiler.disable(EndCall.__call__)  # type: ignore[method-assign]
    Skipper.begin = torch.compiler.disable(Skipper.begin)  # type: ignore[method-assign]
    Skipper.end = torch.compiler.disable(Skipper.end)  # type: ignore[method-assign]
    skip_frames(Skipper.answer)
