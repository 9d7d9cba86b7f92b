"""Finds out which step of which generation a call of the denoiser belongs to, and which samples of its batch are the
same picture. No value of a tensor is ever read.

There are three sources. The first that is available counts:

1. **The user**, who calls `handle.begin(num_steps)` and `handle.step(i)`, perhaps with the pass over the step.
2. **The scheduler of the running pipeline.** This is the pipeline whose `__call__` is on Python's stack, or else the
   one that was passed to `speed_up`. The position is known if the timestep of the call is a view into the
   scheduler's `timesteps` (its offset is the position), or if the scheduler counts by itself (`step_index`,
   `begin_index`). Calls at one position are passes over one step: the two halves of guidance, the tiles of an image.
   A generation begins with new timesteps, or when the position goes back.
3. **The identity of tensors**, if there is no scheduler, or its position is not known. A call is another pass over the
   same step if it has the same sample with a conditioning not seen in this step; with a scheduler, also if its sample
   has another shape (skip-layer guidance). Anything else begins a new step, so that a plain loop counts every call.
   Without a scheduler, a new conditioning begins a new generation. With one, it does so if all steps are done, or if
   the old conditioning no longer exists.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from toma_diffusion.checks import check_integer
from toma_diffusion.errors import UsageError

DENOISERS = ("unet", "transformer", "transformer_2", "transformer_ref")
"""Where diffusers pipelines keep their denoisers. Most have one; Wan 2.2 has one for each half of the noise levels."""
COMPONENTS = "components"
"""Name of the argument that holds the parts of a running modular pipeline, in a call of one of its blocks."""
_generations = itertools.count(1)
MOST_PASSES = 1000
"""More passes over one step than any loop makes, such as the tiles of a large picture. Beyond this, a loop without a
pipeline is assumed that always uses one timestep."""


def steps_unknown(what: str, instead: str) -> RuntimeError:
    """The error to raise where a setting needs the number of steps. `instead` says what else can be done."""
    return RuntimeError(
        f"{what} the number of steps, which is not known here. Call handle.begin(num_steps) before a generation and "
        f"handle.step(i) before each step, run the model inside a pipeline, or {instead}."
    )


@dataclass(frozen=True)
class Tick:
    """The place of a call in its generation."""

    step: int
    """From 0, in this generation."""
    num_steps: int | None
    """Steps of this generation, if known."""
    pass_index: int
    """Which pass over the step this is, from 0."""
    first_pass: int
    """The first pass over the step with the very same sample. Another one than this: guidance makes several passes."""
    parts: int
    """Of how many parts the batch consists that are the same pictures with other prompts, as the running pipeline
    says; 1 if it is not known."""
    is_exact: bool
    """Whether the step was set by the user or read from a scheduler, not inferred from the identity of tensors."""
    generation: int
    """A number of its own for every generation. Not every denoiser of a pipeline sees the first step of one."""


class StepCounter:
    """Counts the steps of the denoisers of one pipeline. Holds no tensor and no pipeline alive."""

    def __init__(self, pipeline: Any = None) -> None:
        self._pipeline = weakref.ref(pipeline) if pipeline is not None else None
        self._timesteps = Identity(None)
        self.generation = 0
        """The number of the generation in progress."""
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a copied or pickled model is in no pipeline that is known

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def reset(self) -> None:
        """Forget everything, also what the user has set: the next call begins a new generation."""
        self._given_num_steps: int | None = None
        self._given_step: int | None = None
        self._given_pass: int | None = None
        self._given_parts: int | None = None
        self._given_scheduler: Any = None
        self._read_scheduler: weakref.ref[Any] | None = None
        self._restart()

    @property
    def scheduler(self) -> Any:
        if self._given_num_steps is not None:
            return self._given_scheduler
        return None if self._read_scheduler is None else self._read_scheduler()

    @property
    def first(self) -> int:
        """Index of the generation's first step among the scheduler's timesteps; 0 if it is not known."""
        return self._first or 0

    @property
    def pipeline(self) -> Any:
        """The one that was passed to `speed_up`, if it still exists."""
        return None if self._pipeline is None else self._pipeline()

    @property
    def given_num_steps(self) -> int | None:
        """Of the generation that the user has begun."""
        return self._given_num_steps

    @property
    def has_pass(self) -> bool:
        """Whether the user says which pass over the step a call is."""
        return self._given_pass is not None

    def begin(self, num_steps: int, scheduler: Any = None) -> None:
        """The next call begins a generation of so many steps, with the noise levels of that scheduler."""
        num_steps = check_integer("num_steps", num_steps, minimum=1)
        self.reset()
        self._given_num_steps, self._given_scheduler = num_steps, scheduler

    def set_step(self, step: int, pass_index: int | None = None, parts: int | None = None) -> None:
        """The calls from now on belong to this step, from 0. Going back begins a new generation, and so does step 0.

        With `pass_index`, the next call is that pass over the step, of so many `parts`; then step 0 may be set again
        for its other passes.
        """
        most = self._given_num_steps
        if isinstance(step, bool) or not isinstance(step, int) or step < 0 or (most is not None and step >= most):
            allowed = "0 or more" if most is None else f"from 0 to {most - 1} after begin({most})"
            raise UsageError(f"step={step!r} is not allowed: it must be a whole number, {allowed}.")
        if pass_index is not None:
            pass_index = check_integer("pass_index", pass_index, minimum=0)
        if parts is not None:
            parts = check_integer("parts", parts, minimum=1)
        repeats = pass_index is not None and step == self._given_step
        if not repeats and (step == 0 or self._given_step is None or step < self._given_step):
            self._restart()
        elif step != self._given_step:
            self._passes.clear()
        self._given_step, self._given_pass, self._given_parts = step, pass_index, parts

    def read(
        self,
        model: nn.Module,
        sample: Tensor,
        conditioning: Tensor | None,
        timestep: Any = None,
        batch: int | None = None,
    ) -> Tick:
        """Count one call of the denoiser. The batch size is that of the sample, if it is not passed."""
        found = running_pipeline(model)
        self._parts = 1 if found is None else found.parts(sample.shape[0] if batch is None else batch)
        if self._given_step is not None:
            self._step = self._given_step
            tick = self._note(sample, conditioning, self._given_num_steps, is_exact=True)
            if self._given_parts is not None:
                tick = replace(tick, parts=self._given_parts)
            if self._given_pass is not None:
                tick = replace(tick, pass_index=self._given_pass, first_pass=self._given_pass)
            return tick
        running = found.pipeline if found is not None and self._given_num_steps is None else None
        scheduler = self._scheduler(running)
        self._read_scheduler = None if scheduler is None else weakref.ref(scheduler)
        timesteps = getattr(scheduler, "timesteps", None)
        if self._step >= 0 and not self._timesteps.holds(timesteps):
            self._restart()
        position = None if timesteps is None else _position(scheduler, timesteps, timestep)
        if timesteps is not None and position is not None:
            noted = self._noted_steps(running)
            latest_first = None if noted is None else len(timesteps) - noted
            self._go_to(*position, sample, conditioning, running is not None, latest_first)
        else:
            self._infer(timesteps, self._count_steps(running, timesteps), sample, conditioning)
        self._timesteps = Identity(timesteps)
        return self._note(sample, conditioning, self._count_steps(running, timesteps), is_exact=position is not None)

    def foresee(self, model: nn.Module, timestep: Any) -> int | None:
        """The step that a call of the denoiser with this timestep would belong to. It is not counted.

        None if it would begin a generation, or if that is not known.
        """
        if self._begins or self._given_step is not None:
            return None if self._begins else self._given_step
        found = running_pipeline(model)
        if found is None or self._given_num_steps is not None:
            return None
        scheduler = self._scheduler(found.pipeline)
        timesteps = getattr(scheduler, "timesteps", None)
        position = None if timesteps is None else _position(scheduler, timesteps, timestep)
        if position is None or position[0] < self._last or not self._timesteps.holds(timesteps):
            return None
        if position[0] == self._last:
            return self._step
        return 1 if self._is_assumed else position[0] - (self._first or 0)

    def _restart(self) -> None:
        self._begins = True
        """Whether the next call is the first of a generation."""
        self._step = -1
        self._first: int | None = None
        """Position of the first step among the scheduler's timesteps, if it is known."""
        self._last = -1
        """Position of the last call."""
        self._is_assumed = False
        """Whether that position was assumed, because the scheduler had not begun to count."""
        self._passes: list[tuple[Identity, Identity, tuple[int, ...]]] = []
        self._timesteps = Identity(None)
        self._conditioning = Identity(None)

    def _scheduler(self, running: Any) -> Any:
        if self._given_num_steps is not None:
            return None
        pipeline = self.pipeline if running is None else running
        return getattr(pipeline, "scheduler", None)

    def _count_steps(self, running: Any, timesteps: Any) -> int | None:
        if timesteps is None:
            return self._given_num_steps
        # A running pipeline knows how many steps it makes: fewer if it starts late or ends early. The number of a
        # pipeline that is not running may be from an earlier generation.
        noted = self._noted_steps(running)
        return len(timesteps) - (self._first or 0) if noted is None else noted

    def _noted_steps(self, running: Any) -> int | None:
        noted = getattr(running, "num_timesteps", None)
        return noted if isinstance(noted, int) and noted > 0 else None

    def _go_to(
        self,
        position: int,
        is_assumed: bool,
        sample: Tensor,
        conditioning: Tensor | None,
        is_running: bool,
        latest_first: int | None,
    ) -> None:
        """Count a call at a known position among the scheduler's timesteps.

        Args:
            is_running: whether it comes from a pipeline that is running. A new call of one makes new timesteps, so that
                the same sample and conditioning again are another pass: guidance that leaves out layers makes such.
            latest_first: the last position at which a generation of so many steps can have begun, if the pipeline says
                how many it makes. The first step may have been made by another denoiser of the pipeline.
        """
        goes_back = position < self._last
        seen = any(known.holds(sample) and given.holds(conditioning) for known, given, _ in self._passes)
        repeats = position == self._last and not is_running and (seen or len(self._passes) >= MOST_PASSES)
        if goes_back or repeats:
            self._restart()
        if self._step < 0:
            self._first = position if latest_first is None else max(0, min(position, latest_first))
            self._step = position - self._first
        elif position > self._last:
            if self._is_assumed:
                self._first = position - 1  # now the position of the first step is known
            self._step = position - (self._first or 0)
            self._passes.clear()
        self._last, self._is_assumed = position, is_assumed

    def _infer(self, timesteps: Any, num_steps: int | None, sample: Tensor, conditioning: Tensor | None) -> None:
        """Count a call by the identity of its tensors."""
        is_new_step = self._is_new_step(sample, conditioning, is_scheduled=timesteps is not None)
        if self._step < 0 or (is_new_step and self._is_new_generation(timesteps, num_steps, sample, conditioning)):
            self._restart()
        if is_new_step or self._step < 0:
            self._step += 1
            self._passes.clear()

    def _is_new_generation(
        self, timesteps: Any, num_steps: int | None, sample: Tensor, conditioning: Tensor | None
    ) -> bool:
        if self._conditioning.holds(conditioning):
            return False
        if timesteps is None:
            return self._given_num_steps is None or self._step + 1 >= self._given_num_steps
        is_exhausted = num_steps is not None and self._step + 1 >= num_steps
        # If the batch size changes together with the conditioning, guidance has ended early; it is no new generation.
        return is_exhausted or (self._conditioning.is_gone and tuple(sample.shape) == self._passes[0][2])

    def _is_new_step(self, sample: Tensor, conditioning: Tensor | None, *, is_scheduled: bool) -> bool:
        for known, given, shape in self._passes:
            if known.holds(sample):
                if given.holds(conditioning):
                    return True
            elif tuple(sample.shape) == shape or not is_scheduled:
                return True
        return not self._passes

    def _note(self, sample: Tensor, conditioning: Tensor | None, num_steps: int | None, *, is_exact: bool) -> Tick:
        if not self._passes:
            self._conditioning = Identity(conditioning)
        self._passes.append((Identity(sample), Identity(conditioning), tuple(sample.shape)))
        pass_index = len(self._passes) - 1
        first = next(index for index, (known, _, _) in enumerate(self._passes) if known.holds(sample))
        if self._begins:
            self.generation, self._begins = next(_generations), False
        return Tick(self._step, num_steps, pass_index, first, self._parts, is_exact, self.generation)


@dataclass(frozen=True)
class Running:
    """A pipeline that is running."""

    pipeline: Any
    variables: Mapping[str, Any]
    """Of its call."""

    @property
    def guidance(self) -> float | None:
        value = getattr(self.pipeline, "guidance_scale", None)
        if value is None:
            value = getattr(
                getattr(self.pipeline, "guider", None), "guidance_scale", self.variables.get("guidance_scale")
            )
        return float(value) if isinstance(value, (int, float)) else None

    def parts(self, batch: int) -> int:
        """Of how many parts a batch of the denoiser consists that are the same pictures with other prompts.

        Pipelines put the parts one after another: without the prompt, with it, perturbed or without the image. If the
        batch is not the pictures times their number, it is something else, such as views of a panorama: 1.
        """
        pictures = self.variables.get("latents")
        guided = getattr(self.pipeline, "do_classifier_free_guidance", None)
        guided = self.variables.get("do_classifier_free_guidance") if guided is None else guided
        perturbed = getattr(self.pipeline, "do_perturbed_attention_guidance", False)
        by_image = guided and getattr(self.pipeline, "image_guidance_scale", None) is not None
        parts = 1 + sum(each is True for each in (guided, perturbed, bool(by_image)))
        return parts if isinstance(pictures, Tensor) and batch == parts * pictures.shape[0] else 1


def running_pipeline(model: nn.Module) -> Running | None:
    """The pipeline that is running and has `model` for its denoiser; None if there is none.

    It is searched for on Python's stack: a function `__call__` whose first argument, or whose `components`, has a
    scheduler and this model. There is no other way to know which of several pipelines that share a model is running.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__call__":
            arguments = code.co_varnames[: code.co_argcount]
            for name in (*arguments[:1], *(each for each in arguments[1:] if each == COMPONENTS)):
                if _holds(frame.f_locals.get(name), model):
                    return Running(frame.f_locals[name], frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _holds(owner: Any, model: nn.Module) -> bool:
    if isinstance(owner, nn.Module) or getattr(owner, "scheduler", None) is None:
        return False
    denoisers = [getattr(owner, name, None) for name in DENOISERS]
    return any(getattr(denoiser, "_orig_mod", denoiser) is model for denoiser in denoisers)


def _position(scheduler: Any, timesteps: Any, timestep: Any) -> tuple[int, bool] | None:
    """The position of a call among the scheduler's timesteps, and whether it is assumed. None if it is not known."""
    if (offset := _offset(timesteps, timestep)) is not None:
        return offset, False
    if not hasattr(scheduler, "step_index"):
        return None
    if isinstance(scheduler.step_index, int):
        return scheduler.step_index, False
    begin = getattr(scheduler, "begin_index", None)  # most schedulers begin to count at their first step
    return (begin, False) if isinstance(begin, int) else (0, True)


def _offset(timesteps: Any, timestep: Any) -> int | None:
    """The index of `timestep` in `timesteps`, if it is a view of one of its elements, perhaps expanded over a batch."""
    if not isinstance(timesteps, Tensor) or not isinstance(timestep, Tensor) or timestep.dtype != timesteps.dtype:
        return None
    if timestep.device != timesteps.device or timestep.device.type == "meta" or any(timestep.stride()):
        return None
    if timestep.untyped_storage().data_ptr() != timesteps.untyped_storage().data_ptr():
        return None
    offset = int(timestep.storage_offset() - timesteps.storage_offset())
    return offset if 0 <= offset < len(timesteps) else None


class Identity:
    """Remembers an object without keeping it alive."""

    def __init__(self, value: Any) -> None:
        self._reference = None if value is None else weakref.ref(value)

    def holds(self, value: Any) -> bool:
        return value is None if self._reference is None else value is not None and self._reference() is value

    @property
    def is_gone(self) -> bool:
        return self._reference is not None and self._reference() is None
