"""In which steps of a generation the denoiser runs, decided step by step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Decisions:
    """What was decided in one generation so far."""

    step: int = -1
    """The step in progress."""
    runs: bool = True
    """Whether the denoiser runs in the passes over it that are still to come."""
    must_run_next: bool = False
    """Whether it runs in the next step, whatever the plan: a pass over this one had nothing to be predicted from."""
    _computed: set[int] = field(default_factory=set)
    _predicted: set[int] = field(default_factory=set)

    @property
    def counts(self) -> tuple[int, int]:
        """How many steps were computed, and in how many a pass was predicted."""
        return len(self._computed - self._predicted), len(self._predicted)

    def begin_step(self, step: int, *, is_planned: bool) -> None:
        """A call belongs to this step. `is_planned` says whether the plan is to run the denoiser in it."""
        if step != self.step:
            self.step, self.runs, self.must_run_next = step, self.must_run_next or is_planned, False

    def run_without_history(self) -> None:
        """A pass has nothing to be predicted from: run. If an earlier pass was predicted already, run next time too."""
        self.runs, self.must_run_next = True, self.step in self._predicted

    def run_again(self, step: int) -> None:
        """Run in all passes over this step that are still to come, also if it was predicted already."""
        if step == self.step:
            self.runs, self.must_run_next = True, False
            self._predicted.discard(step)
        else:
            self.must_run_next = True

    def note(self, step: int, *, predicted: bool) -> None:
        """A pass over this step was predicted, or computed."""
        (self._predicted if predicted else self._computed).add(step)
