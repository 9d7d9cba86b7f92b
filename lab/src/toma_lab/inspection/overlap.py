"""Figure 4 of the paper: which fraction of a step's destinations was already chosen at the start of its ten steps.

The higher it is, the less is lost by choosing once for all ten steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from toma_diffusion import Merge
from toma_diffusion.merge import Action, MergePlan
from toma_lab.inspection.figures import new_figure
from toma_lab.inspection.watch import BlockInput

INTERVAL = 10
"""Steps after which the paper chooses again."""


@dataclass(frozen=True)
class Share:
    """One point of the figure."""

    block: str
    kind: str
    step: int
    share: float
    """Fraction of this step's destinations that were also chosen in the first step of its interval."""

    @property
    def row(self) -> dict[str, object]:
        return vars(self) | {"share": round(self.share, 4)}


@dataclass(eq=False)
class OverlapRecorder:
    """Chooses destinations in every block and step independently. Pass it to `watch`."""

    config: Merge
    shares: list[Share] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first: dict[str, set[int]] = {}

    def __call__(self, block_input: BlockInput) -> None:
        """Compare the block's destinations with those of the interval's first step."""
        tokens = block_input.tokens
        plan = MergePlan(block_input.grid, self.config, batch_size=1, dtype=tokens.dtype, device=tokens.device)
        plan.update(tokens[None], Action.SELECT)
        chosen = set(plan.positions[0].tolist())
        if block_input.step % INTERVAL == 0:
            self._first[block_input.block] = chosen
        share = len(chosen & self._first[block_input.block]) / len(chosen)
        self.shares.append(Share(block_input.block, block_input.kind, block_input.step, share))


def plot_overlap(shares: list[Share], config: Merge, title: str, path: Path) -> None:
    """Write a figure with one curve per block. The dashed line is the fraction expected by chance."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    kinds = list(dict.fromkeys(point.kind for point in shares))
    figure, axes = new_figure(title, (9, 1 + 3.2 * len(kinds)), len(kinds), 1)
    for axis, kind in zip(axes[:, 0], kinds, strict=True):
        blocks = list(dict.fromkeys(point.block for point in shares if point.kind == kind))
        for index, block in enumerate(blocks):
            color = colormaps["viridis"](index / max(1, len(blocks) - 1) * 0.9)
            points = [point for point in shares if point.block == block]
            for start, interval in groupby(points, key=lambda point: point.step // INTERVAL):
                steps, kept = zip(*((point.step, point.share) for point in interval), strict=True)
                axis.plot(steps, kept, ".-", color=color, lw=1.2, label=block if start == 0 else None)
        axis.axhline(1 - config.ratio, color="#888888", ls="--", lw=1)
        axis.annotate("by chance", (0, 1 - config.ratio), xytext=(2, 3), textcoords="offset points", color="#666666")
        axis.set(ylabel="share of destinations kept", ylim=(0, 1.03), title=kind)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(
            fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + len(blocks) // 24
        )
    axes[-1, 0].set_xlabel(f"step (compared with the first of each {INTERVAL})")
    figure.savefig(path, dpi=130)
