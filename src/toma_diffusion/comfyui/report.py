"""What happened while a clone sampled, as text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from toma_diffusion.summary import Summary

WHOLE, MERGED, SKIPPED = "whole", "merged", "skipped"
KINDS = (WHOLE, MERGED, SKIPPED)


@dataclass
class StepTimes:
    """How long steps took, by what was done in them.

    A step lasts until the next begins. ComfyUI's samplers wait for the GPU to read the next noise level, and so do we:
    this is the time of the work, not of launching it. The first step also warms up, and the end of the last is not
    waited for: both are counted, but not timed.
    """

    steps: list[tuple[str, float]] = field(default_factory=list)
    """What was done in every step that has ended, and its seconds."""
    _began: float = 0.0
    _kind: str | None = None
    """Of the step that is running."""

    def begin_step(self) -> None:
        self.end()
        self._began = time.perf_counter()

    def note(self, kind: str) -> None:
        """A call of the running step did this. If its calls did several things, it counts as skipped before merged."""
        self._kind = kind if self._kind is None else max(self._kind, kind, key=KINDS.index)

    def repeat_step(self) -> None:
        """What the calls of the running step did does not count: they are made again."""
        self._kind = None

    def end(self) -> None:
        if self._kind is not None:
            self.steps.append((self._kind, time.perf_counter() - self._began))
        self._kind = None

    def lines(self) -> list[str]:
        counts = {kind: sum(each == kind for each, _ in self.steps) for kind in KINDS}
        counted = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        means = {}
        for kind in KINDS:
            times = [seconds for each, seconds in self.steps[1:-1] if each == kind]
            if times:
                means[kind] = sum(times) / len(times)
        lines = [f"steps: {counted}" if counted else "no step was made"]
        lines += [f"a {kind} step took {mean:.3f} s on average" for kind, mean in means.items()]
        fast = [kind for kind in (MERGED, SKIPPED) if kind in means]
        if WHOLE in means and fast:
            saved = sum(counts[kind] * (means[WHOLE] - means[kind]) for kind in fast)
            spent = sum(counts[kind] * means[kind] for kind in means)
            lines.append(f"time saved: about {saved:.2f} s of {spent + saved:.2f} s ({saved / (spent + saved):.0%})")
        elif fast:
            lines.append("time saved: not known, because no whole step was timed; run once without ToMA to compare")
        return lines


@dataclass(frozen=True)
class Report:
    """What the report node shows."""

    summary: Summary
    times: StepTimes
    notes: tuple[str, ...] = ()
    """About calls that ran as they are, and why."""
    interrupted: bool = False

    def __str__(self) -> str:
        lines = [*described(self.summary), *self.times.lines(), *(f"note: {note}" for note in self.notes)]
        if self.interrupted:
            lines.append("note: sampling was interrupted, or failed")
        return "\n".join(lines)


def described(summary: Summary) -> list[str]:
    """What was done, or before the first sampling what is planned. Without tables, which nodes cannot show."""
    lines = [] if summary.skip is None else list(summary.skip.lines)
    merge = summary.merge
    if merge is not None and merge.is_used:
        lines.append(merge.headline)
        lines += [
            f"{kind.kind}: {kind.tokens_before} → {kind.tokens_after} tokens of a grid of {kind.grid}"
            for kind in merge.kinds
            if kind.tokens_before is not None
        ]
        lines += merge.lines()
    return lines + [f"note: {note}" for note in summary.notes]
