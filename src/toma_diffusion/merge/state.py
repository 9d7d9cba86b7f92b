"""What all hooks that merge share: the settings, the plans, and what to do in the current call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from toma_diffusion.engine.arguments import Given
from toma_diffusion.engine.clock import Tick, steps_unknown
from toma_diffusion.engine.session import Session
from toma_diffusion.errors import UsageError
from toma_diffusion.merge import Action, Grid, Plan, Schedule
from toma_diffusion.merge.base import Merging

if TYPE_CHECKING:
    from toma_diffusion.merge.sites import Stage

PlanKey = tuple[str, int, Grid, int, int, torch.dtype, torch.device, bool]


@dataclass(frozen=True)
class Call:
    """The facts about one call of the denoiser, which a model family reads."""

    sample: Tensor
    """The noisy input. A new tensor may mean a new step."""
    conditioning: Tensor | None
    """The text. A new tensor may mean another pass over the step."""
    timestep: object = None
    """As it was passed. If it is a view into the scheduler's timesteps, the step is known exactly."""
    grids: dict[str, Grid] = field(default_factory=dict)
    """The image grid of every kind of block."""
    image_at: int | None = None
    """Where the grid begins in every sequence of tokens: counted from the beginning, or from the end if negative. None:
    it is at the end."""
    lengths: dict[str, int] = field(default_factory=dict)
    """The length of the sequence that goes through the blocks of a kind, if there is more in it than the image and
    what `image_at` says."""
    first_frame_apart: bool = False
    """Whether the first frame of the grid, which all kinds share, stands for fewer pictures than others do, as with a
    causal autoencoder. It is left whole where only the other frames can be divided into regions over several."""
    batch: int | None = None
    """Batch size, if `sample` is a single picture."""
    dtype: torch.dtype | None = None
    """Of the tokens that go through the blocks, if it is not that of `sample`."""
    joint: bool = False
    """Whether the whole batch has one position table, so that all samples must share their destinations."""
    block_by_block: str | None = None
    """The reason why stages cannot stay merged in this call, if any. They are merged block by block."""
    blocks_left_whole: str | None = None
    """The reason why a module needs all tokens in this call, if any. In `module` scope that module is not merged, in
    the other scopes nothing is."""
    left_whole: str | None = None
    """The reason why nothing can be merged in this call, if any."""

    @property
    def batch_size(self) -> int:
        return self.sample.shape[0] if self.batch is None else self.batch

    @property
    def token_dtype(self) -> torch.dtype:
        return self.sample.dtype if self.dtype is None else self.dtype

    def length(self, kind: str) -> int:
        """Tokens of a sample that go through the blocks of a kind."""
        if kind in self.lengths:
            return self.lengths[kind]
        from_the_end = -self.image_at if self.image_at is not None and self.image_at < 0 else 0
        return from_the_end or self.grids[kind].num_tokens


@dataclass(frozen=True)
class BlockRecord:
    """One transformer block, as it was installed."""

    name: str
    kind: str
    width: int
    merged: tuple[str, ...]
    """The modules merged, or the block itself."""
    merges: int
    """How often tokens are merged and unmerged in it. In a stage it is counted in the first."""
    left_whole: str | None
    """Why nothing in it is merged, if so."""


def image_start(length: int, image_at: int | None, grid: Grid) -> int:
    """The index at which the image grid begins in a sequence of that length, see `Call.image_at`."""
    if image_at is None:
        return length - grid.num_tokens
    return image_at if image_at >= 0 else length + image_at


@dataclass(eq=False)
class Slot:
    """Holds the plan that several sites share. It is an attribute, not a key of a dictionary, so that blocks with plans
    of their own can share compiled code."""

    name: str
    kind: str
    """The kind of its blocks. The plan has their grid."""
    make: Callable[..., Plan]
    """Makes a plan from a grid, `batch_size`, `parts`, `dtype`, `device` and `joint`."""
    sharers: str = ""
    """Which blocks of the kind share it: the name of a stage, or of the kind."""
    plan: Plan | None = None
    """The plan of the current call."""
    key: PlanKey | None = None
    """Under which that plan is kept."""
    awaits_tokens: bool = False
    """Whether none of its sites has run yet in this call. The plan is updated from the tokens of the first that runs,
    which is not always the same: skip-layer guidance leaves out blocks, IP-Adapter masks leave out modules."""


@dataclass
class MergeState:
    """The merging of one denoiser, set before every call. Compiled code changes only `awaits_tokens` of a slot, and
    what stages hold while their blocks run.

    Sites that do not come first read `active`, not `action`, so that they need one compiled graph instead of three.
    """

    config: Merging
    session: Session
    read_call: Callable[[nn.Module, Given], Call]
    """Reads the facts about a call of the model. Raises `UsageError` if its inputs cannot be merged."""
    merges_in: Callable[[int | None], bool]
    """Whether tokens are merged in generations of so many steps."""
    records: list[BlockRecord] = field(default_factory=list)
    """What is done in every block of the model."""
    slots: list[Slot] = field(default_factory=list)
    """Ordered by their first sites."""
    active: bool = False
    """Whether anything is merged in this call."""
    action: Action = Action.SELECT
    """What plans do in this call."""
    block_by_block: bool = False
    """Whether stages are merged and unmerged at every block in this call."""
    image_at: int | None = None
    stages: list[Stage] = field(default_factory=list)
    """Blocks that stay merged together."""
    description: tuple[str, ...] = ()
    """What the method does, in lines for `summary()`."""
    why_first_frame_whole: Callable[[Grid], str | None] | None = None
    """For calls with `first_frame_apart`: why the method leaves the first frame of that grid whole, if it does."""
    guidance: str = ""
    """Which samples or passes of the last call shared a plan, for `summary()`."""
    is_required: bool = True
    """Whether the user has asked for merging. If it is only part of a preset, what cannot be merged is left whole."""
    keeps_plans: bool = False
    """Whether plans of earlier generations are kept, because CUDA graphs of the denoiser read them."""

    def __post_init__(self) -> None:
        self.schedule = Schedule.from_config(self.config)
        self._plans: dict[PlanKey, Plan] = {}
        self._used: set[PlanKey] = set()
        self._captured: set[PlanKey] = set()
        """Plans that were used while a CUDA graph was captured around the denoiser. They are never freed."""
        self._updated: set[PlanKey] = set()
        """Plans that were updated in this step."""
        self._has_warned = False
        self.is_used: bool | None = None
        """Whether the last generation was one in which tokens are merged; None before the first."""

    @property
    def current(self) -> dict[str, Plan]:
        """The plans of the current or the last call, by the names of their slots."""
        return {slot.name: slot.plan for slot in self.slots if slot.plan is not None}

    @property
    def merges_nothing(self) -> bool:
        plans = self.current.values()
        return bool(plans) and all(plan.is_identity for plan in plans)

    @property
    def num_bytes(self) -> int:
        return sum(plan.num_bytes for plan in self._plans.values())

    def plan_of(self, kind: str) -> Plan | None:
        """A plan of the current or the last call for that kind of block."""
        return next((slot.plan for slot in self.slots if slot.kind == kind), None)

    def acts_in(self, num_steps: int) -> bool:
        """Whether any of so many steps merges."""
        return self.merges_in(num_steps) and self.schedule.merges(num_steps)

    def why_idle(self, num_steps: int) -> str:
        """The setting because of which none of so many steps merges."""
        return f"window={self.config.window}" if self.merges_in(num_steps) else ""

    def before_call(self, model: nn.Module, given: Given) -> None:
        """Set everything up for one call of the denoiser. Runs outside compiled code, and never waits for the GPU."""
        session = self.session
        try:
            call = self.read_call(model, given)
        except UsageError as error:  # inputs that cannot be merged
            if session.enabled and self._may_merge(session.tick):
                if self.is_required:
                    raise
                session.notes.add(f"nothing was merged: {error}")
            self.active = False
            if session.tick is not None:
                session.begin_call(session.tick)
            return
        tick = session.tick
        if tick is None:
            tick = session.steps.read(model, call.sample, call.conditioning, call.timestep, call.batch_size)
        self._check_steps_known(tick)
        self.begin_call(call, tick, begins=session.begin_call(tick))

    def begin_call(self, call: Call, tick: Tick, *, begins: bool) -> None:
        """Set everything up for a call, which may be the first of a generation."""
        session = self.session
        self._note_updates(tick)
        for stage in self.stages:
            stage.whole = stage.merged = None  # of a call that an error has ended
        if begins:
            self._begin_generation()
            self.is_used = self._merges_any(tick.num_steps)
        action = None
        if session.enabled and self.merges_in(tick.num_steps):
            action = self.schedule.action(tick.step, tick.num_steps, session.computed)
        self.active, self.action = action is not None, action or Action.REUSE
        self.block_by_block = self.config.scope == "stage" and call.block_by_block is not None
        if self.block_by_block:
            session.notes.add(f"stages were merged block by block: {call.block_by_block}")
        if call.blocks_left_whole is not None:
            effect = "single modules were left whole" if self.config.scope == "module" else "nothing was merged"
            session.notes.add(f"{effect}: {call.blocks_left_whole}")
            self.active = self.active and self.config.scope == "module"
        if call.left_whole is not None:
            session.notes.add(f"nothing was merged: {call.left_whole}")
            self.active = False
        session.acted = session.acted or action is not None
        if self.active:
            parts, pass_index = self._sharing(call, tick)
            grids, self.image_at = self._merged_part(call)
            for slot in self.slots:
                slot.key, slot.plan = self._plan(slot, call, grids[slot.kind], pass_index, parts)
                slot.awaits_tokens = True
                slot.plan.begin_call()
            self._warn_if_nothing_is_removed()
            if pass_index < tick.pass_index and all(slot.key in self._updated for slot in self.slots):
                self.action = Action.REUSE  # another pass of guidance has updated these plans in this step

    def forget(self) -> None:
        """Make every plan select again when it is next used. Buffers are kept."""
        for plan in self._plans.values():
            plan.forget()

    def _may_merge(self, tick: Tick | None) -> bool:
        """Whether tokens are merged in the generation that the running call belongs to, or that is not known."""
        return tick is None or tick.num_steps is None or self.acts_in(tick.num_steps)

    def _check_steps_known(self, tick: Tick) -> None:
        """Raise if the number of steps is needed and not known."""
        if self.session.enabled and tick.num_steps is None and self.schedule.needs is not None:
            raise steps_unknown(f"{self.schedule.needs} needs", "use settings that do not depend on it")

    def _warn_if_nothing_is_removed(self) -> None:
        if self.merges_nothing and not self._has_warned:
            self._has_warned = True
            why = "; ".join(dict.fromkeys(plan.describe() for plan in self.current.values()))
            advice = "merge with a smaller min_tokens, or in larger regions"
            warnings.warn(f"no token is removed on these grids ({why}): {advice}.", stacklevel=2)

    def _merges_any(self, num_steps: int | None) -> bool:
        """Whether tokens are merged in any computed step. Warns if steps are skipped and none of the others merges."""
        if num_steps is None or not self.merges_in(num_steps):
            return self.merges_in(num_steps)
        computed = self.session.computed
        if computed is None or any(self.schedule.action(step, num_steps, computed) for step in computed):
            return True
        if self.session.enabled and not self._has_warned:
            self._has_warned = True
            steps = ", ".join(map(str, computed))
            warnings.warn(
                f"tokens are never merged: none of the computed steps ({steps}) of {num_steps} lies in "
                f"window={self.config.window}.",
                stacklevel=2,
            )
        return False

    def _note_updates(self, tick: Tick) -> None:
        """Note which plans the last call updated, if this call belongs to the same step."""
        if tick.pass_index == 0:
            self._updated.clear()
        else:
            self._updated |= {slot.key for slot in self.slots if slot.key is not None and not slot.awaits_tokens}

    def _sharing(self, call: Call, tick: Tick) -> tuple[int, int]:
        """Of how many parts that share a plan the batch consists, and the pass whose plans this call uses."""
        asked, batch = self.config.guidance_parts, call.batch_size
        if asked == 1:
            self.guidance = "every sample chooses for itself"
            return 1, tick.pass_index
        parts = tick.parts if isinstance(asked, str) else asked
        if batch % parts:
            said = f"parts={parts} of handle.step" if isinstance(asked, str) else f"guidance_parts={asked}"
            raise UsageError(f"{said} does not divide a batch of {batch}: give a number that does.")
        passes = "; passes over one sample share a plan" if tick.first_pass < tick.pass_index else ""
        self.guidance = (
            "every sample chooses for itself" if parts == 1 else f"{parts} parts of guidance choose together"
        ) + passes
        return parts, tick.first_pass

    def _begin_generation(self) -> None:
        """Keep the plans that the last generation used, and free the others."""
        if not self.keeps_plans:
            kept = self._used | self._captured
            self._plans = {key: plan for key, plan in self._plans.items() if key in kept}
        self._used.clear()
        self.forget()

    def _merged_part(self, call: Call) -> tuple[dict[str, Grid], int | None]:
        """The grids that are merged, and where they begin: those of the call, perhaps without their first frame."""
        if not call.first_frame_apart or self.why_first_frame_whole is None:
            return call.grids, call.image_at
        grid = next(iter(call.grids.values()))
        reason = self.why_first_frame_whole(grid)
        if reason is None:
            return call.grids, call.image_at
        self.session.notes.add(f"the first of {grid.frames} frames was left whole: {reason}")
        rest = grid.without_first_frame
        begins = None if call.image_at is None else call.image_at + grid.num_tokens - rest.num_tokens
        return dict.fromkeys(call.grids, rest), begins

    def _plan(self, slot: Slot, call: Call, grid: Grid, pass_index: int, parts: int) -> tuple[PlanKey, Plan]:
        sample = call.sample
        key = (slot.name, pass_index, grid, call.batch_size, parts, call.token_dtype, sample.device, call.joint)
        if key not in self._plans:
            with torch.inference_mode(False):  # buffers made in inference mode cannot be updated outside it
                plan = slot.make(
                    grid,
                    batch_size=call.batch_size,
                    parts=parts,
                    dtype=call.token_dtype,
                    device=sample.device,
                    joint=call.joint,
                )
            _make_static(plan.buffers)
            self._plans[key] = plan
        self._used.add(key)
        if sample.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured.add(key)
        return key, self._plans[key]


def _make_static(buffers: list[Tensor]) -> None:
    """Let compiled code update these inside a CUDA graph. Another pass has others, and must not compile again."""
    from torch._dynamo import mark_static_address  # slow to import; `hold_compiler` has done it

    for buffer in buffers:
        mark_static_address(buffer, guard=False)
