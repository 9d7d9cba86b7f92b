"""Stands in front of a denoiser: runs it in the steps that are computed, and predicts its output in the others.

`nn.Module.__call__` calls it in the place of everything else. So it is outside hooks: offloaded weights are not moved
in a skipped step. It is outside `torch.compile`: compiled code is not entered. And it is outside context parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toma_diffusion.engine.arguments import Given, parameter_names
from toma_diffusion.engine.clock import Tick, running_pipeline
from toma_diffusion.engine.compile import skip_frames
from toma_diffusion.engine.hooks import Hook, remove_hooks
from toma_diffusion.engine.install import refuse_export
from toma_diffusion.engine.session import Session
from toma_diffusion.errors import UsageError
from toma_diffusion.skip import controlnet, front
from toma_diffusion.skip.config import BySteps
from toma_diffusion.skip.front import Front
from toma_diffusion.skip.generation import Decisions, Generation
from toma_diffusion.skip.history import History, Passes, Seen
from toma_diffusion.skip.learned import Learned
from toma_diffusion.skip.summary import SkipSummary, summarize

if TYPE_CHECKING:
    from toma_diffusion.skip.recording import Recorder


NAMED = "cache_context"
"""How diffusers' pipelines name the passes over a step: `with transformer.cache_context("cond"):`."""


@dataclass(frozen=True)
class Call:
    """A call that the denoiser must run for."""

    tick: Tick
    key: Hashable
    """Which pass over the step it is. None if nothing is kept of it."""
    seen: Seen


class Skipper(Front):
    """The call of one denoiser."""

    def __init__(self, model: nn.Module, by_steps: BySteps, session: Session) -> None:
        super().__init__(model)
        self.by_steps, self.session = by_steps, session
        self.names = parameter_names(model)
        self.controlnets: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """That do not run in skipped steps either."""
        self.pass_name: str | None = None
        """Of the pass that is running, if the pipeline says it."""
        self.learned: Learned | None = None
        """What was learned on the model, for whoever saves it."""
        self.recorder: Recorder | None = None
        """Gets what goes into every call and what comes out, while the denoiser is learned from."""
        self.before: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        """Runs first in every call: a program with models of its own sets the step there."""
        self.forget()

    def __getstate__(self) -> dict[str, Any]:  # a copy begins a new generation
        return {name: getattr(self, name) for name in ("model", "by_steps", "session", "learned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned = state.pop("learned")
        self.__init__(**state)  # type: ignore[misc]
        self.learned = learned
        keep_out_of_graphs()  # a pickled model may be loaded in a process that has not skipped anything yet

    def put(self) -> None:
        super().put()
        if hasattr(type(self.model), NAMED) and not isinstance(vars(self.model).get(NAMED), NamedPasses):
            setattr(self.model, NAMED, NamedPasses(self))
        self._put_before(self.session.steps.pipeline)

    def take_out(self) -> None:
        super().take_out()
        if isinstance(vars(self.model).get(NAMED), NamedPasses):
            delattr(self.model, NAMED)
        for net in self.controlnets:
            controlnet.take_out(net, self)
        self.controlnets.clear()

    def forget(self) -> None:
        """Forget all outputs. The next step is computed."""
        self.generation, self.decisions, self.passes = Generation(), Decisions(), Passes()

    @property
    def is_computing(self) -> bool:
        """Whether the denoiser ran in the last call, or runs in this one."""
        return self.decisions.runs

    @property
    def num_bytes(self) -> int:
        calls = [call for net in self.controlnets if (call := controlnet.call_of(net)) is not None]
        return self.passes.num_bytes + sum(each.num_bytes for each in calls)

    def summary(self) -> SkipSummary:
        if self.recorder is not None and self.recorder.wants_all:
            return SkipSummary(0, 0, None, 0, ("the next generations run whole, to learn how to skip",))
        usual = self.session.only_steps or self.session.steps.given_num_steps
        if usual is None and self.learned is not None:
            usual = self.learned.num_steps
        return summarize(self.by_steps, self.generation, self.decisions, self.num_bytes, usual)

    def acts_in(self, num_steps: int) -> bool:
        skip = self.by_steps(num_steps)
        return skip is not None and skip.count(num_steps) < num_steps

    def why_idle(self, num_steps: int) -> str:
        """The setting because of which all of so many steps are computed."""
        skip = self.by_steps(num_steps)
        return "" if skip is None else f"computed={skip.computed}"

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

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, Any]:
        """Before a call. Returns None and the predicted output if the denoiser need not run."""
        session, seen = self.session, self._seen(args, kwargs)
        tick = session.tick = session.steps.read(self.model, seen.sample, seen.conditioning, seen.timestep, seen.batch)
        if not session.enabled:
            return Call(tick, None, seen), None
        if tick.generation != self.generation.number:
            self._begin_generation(tick)
        name = None if session.steps.has_pass else self.pass_name
        key = self.passes.key_of(tick, name, begins_step=tick.step != self.decisions.step)
        history = self.passes.history(key, seen)
        self.decisions.begin_step(tick.step, is_planned=self.generation.computes(tick.step))
        if not self.decisions.runs and (history is None or not self.passes.is_latest(history)):
            self.decisions.run_without_history()
        if self.decisions.runs or history is None:
            return Call(tick, key, seen), None
        session.tick = None
        return None, self._predict(tick, history, seen)

    def end(self, call: Call, output: Any) -> Any:
        """After the denoiser has run. Returns its output, corrected if that was learned."""
        tick, seen = call.tick, call.seen
        if call.key is None or not self.session.enabled:
            return output
        self.passes.note(tick)
        self.decisions.note(tick.step, predicted=False)
        if self.recorder is not None:
            self.recorder.note(self.model, tick, seen, output)
        if self.generation.computed is None:
            return output  # nothing will be predicted
        history = self.passes.keep(call.key, tick.step, output, seen, self.generation.needs)
        weights = self.generation.learned_weights(tick, history.steps)
        has_gradient = torch.is_grad_enabled() and seen.sample.requires_grad
        return output if weights is None or has_gradient else history.predict(weights, seen)

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part in a call that has begun without it: a copied model makes such a one. It cannot be skipped."""
        self.decisions.must_run_next = True
        self.decisions.step = -1
        call, _ = self.begin(args, kwargs)
        if call is not None:
            self.model.register_forward_hook(EndCall(self, call), with_kwargs=True)

    def compute_again(self, step: int) -> None:
        """Compute all passes over this step that are still to come, also if it was predicted already."""
        self.decisions.run_again(step)

    def will_skip(self, timestep: Any) -> bool | None:
        """Whether the denoiser will not run in the step of this timestep, as far as is known before its first pass.

        None if it is no step of the generation in progress.
        """
        step = self.session.steps.foresee(self.model, timestep)
        if step is None:
            return None
        if not self.session.enabled or self.generation.number != self.session.steps.generation:
            return False
        if step == self.decisions.step:
            return not self.decisions.runs
        return not self.decisions.must_run_next and not self.generation.computes(step) and self.passes.can_predict

    def _seen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
        seen = Seen.of(Given(self.names, args, kwargs))
        if seen is None:
            raise UsageError(
                f"no noisy sample was found among the arguments of {type(self.model).__name__}, so its output cannot "
                "be predicted: call handle.remove()."
            )
        return seen

    def _begin_generation(self, tick: Tick) -> None:
        must_run, running = self.decisions.must_run_next, running_pipeline(self.model)
        self.forget()
        self.decisions.must_run_next = must_run
        teaches = self.recorder is not None and self.recorder.wants_all and tick.num_steps is not None
        self.generation = Generation.begin(
            self.model, tick, self.session.steps, running, self.by_steps, teaches=teaches
        )
        self.session.computed = tuple(range(tick.num_steps or 0)) if teaches else self.generation.computed
        if running is not None:
            self._put_before(running.pipeline)

    def _predict(self, tick: Tick, history: History, seen: Seen) -> Any:
        """The output of a pass over a skipped step."""
        if torch.is_grad_enabled() and seen.sample.requires_grad:
            raise RuntimeError(
                "a skipped step has no gradient: run under torch.no_grad(), or switch handle.enabled off."
            )
        self.generation.check_passes(self.passes.count)
        self.decisions.note(tick.step, predicted=True)
        predicted = history.predict(self.generation.weights(tick, history.steps), seen)
        if self.recorder is not None:
            self.recorder.note(self.model, tick, seen, predicted)
        return predicted

    def _put_before(self, pipeline: Any) -> None:
        net = controlnet.put_before(pipeline, self)
        if net is not None:
            self.controlnets.add(net)


@dataclass(eq=False)
class EndCall(Hook):
    """Forward hook of a call that began without the skipper: hands it the output, once."""

    before = False

    skipper: Skipper
    call: Call

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        remove_hooks(module, lambda hook: hook is self)
        self.skipper.session.tick = None
        return self.skipper.end(self.call, output)


@dataclass(eq=False)
class NamedPasses:
    """`cache_context` of a denoiser: notes the name of the pass, and does what it did before."""

    skipper: Skipper

    @contextmanager
    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        skipper = self.skipper
        before, skipper.pass_name = skipper.pass_name, name
        try:
            with getattr(type(skipper.model), NAMED)(skipper.model, name, *args, **kwargs):
                yield
        finally:
            skipper.pass_name = before


@cache
def keep_out_of_graphs() -> None:
    """Exclude the call from graphs, but not the denoiser that it runs."""
    front.keep_out_of_graphs()
    controlnet.keep_out_of_graphs()
    EndCall.__call__ = torch.compiler.disable(EndCall.__call__)  # type: ignore[method-assign]
    Skipper.begin = torch.compiler.disable(Skipper.begin)  # type: ignore[method-assign]
    Skipper.end = torch.compiler.disable(Skipper.end)  # type: ignore[method-assign]
    skip_frames(Skipper.answer)
