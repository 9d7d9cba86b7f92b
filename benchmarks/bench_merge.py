"""Merge, unmerge, and unmerge added to a residual: of local regions, and with hard assignment.

For the shapes of the paper's Tables 4 and 5 it also times ToMeSD's merge, unmerge and matching: `us` is our code,
`reference_us` the authors' package. ToMA makes its plan once for many blocks and steps, which other benchmarks time;
ToMeSD matches in every block.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from operators import SHAPES, Shape, device, main, microseconds, ready_plans, row
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor

from toma_diffusion.merge import Action, Grid, MergePlan
from toma_diffusion.others.tomesd import CellSampler, MatchingPlan, ToMeSD

PAPER = [
    replace(shape, ratio=ratio)
    for shape in SHAPES
    if shape.side == 8 * shape.tile and shape.batch == 2
    for ratio in (0.25, 0.5, 0.75)
] or [replace(SHAPES[0], ratio=ratio) for ratio in (0.25, 0.5, 0.75)]
"""4096 tokens of width 640 and 1024 of width 1280, in 64 tiles each, as in SDXL; on a CPU one small shape."""


def measure(shape: Shape) -> list[dict[str, object]]:
    tokens = shape.tokens()
    plans = ready_plans(shape, tokens[0])
    assert plans[0].assignment is not None
    merged = [torch.randn_like(plans[0].merge(each)) for each in tokens]
    whole, few = tokens[0].nbytes, merged[0].nbytes
    matrix = sum(buffer.nbytes for buffer in plans[0].assignment.buffers()) // 2

    def times(call: Callable[[MergePlan, Tensor, Tensor], object]) -> tuple[float, float]:
        turn = len(tokens)
        ours, theirs = (
            microseconds(lambda index, plan=plan: call(plan, tokens[index % turn], merged[index % turn]))  # type: ignore[misc]
            for plan in plans
        )
        return ours, theirs

    hard = "_hard" if shape.scale == float("inf") else ""
    rows = [
        row(f"merge{hard}", shape, *times(lambda plan, x, y: plan.merge(x)), whole + few + matrix, tokens),
        row(f"unmerge{hard}", shape, *times(lambda plan, x, y: plan.unmerge(y)), whole + few + matrix, tokens),
        row(
            f"unmerge_residual{hard}",
            shape,
            *times(lambda plan, x, y: plan.unmerge(y, x)),
            2 * whole + few + matrix,
            tokens,
        ),
    ]
    return rows + measure_tomesd(shape, tokens) if shape in PAPER else rows


def measure_tomesd(shape: Shape, tokens: list[Tensor]) -> list[dict[str, object]]:
    """Without random draws, which a captured graph cannot make; they cost one small kernel."""
    shape = replace(shape, tile=2)  # the cells
    grid, config = Grid(shape.side, shape.side), ToMeSD(ratio=shape.ratio, random=False)
    plan = MatchingPlan(grid, config=config, sampler=CellSampler(0), batch_size=shape.batch, device=device())

    def match(each: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        found: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = bipartite_soft_matching_random2d(
            each, shape.side, shape.side, 2, 2, plan.num_removed, no_rand=True
        )
        return found

    plan.update(tokens[0], Action.SELECT)
    merge, unmerge = match(tokens[0])
    merged = [torch.randn_like(merge(each)) for each in tokens]
    whole, few, turn = tokens[0].nbytes, merged[0].nbytes, len(tokens)

    def times(ours: Callable[[int], object], theirs: Callable[[int], object]) -> tuple[float, float]:
        return microseconds(lambda index: ours(index % turn)), microseconds(lambda index: theirs(index % turn))

    merging = times(lambda index: plan.merge(tokens[index]), lambda index: merge(tokens[index]))
    unmerging = times(lambda index: plan.unmerge(merged[index]), lambda index: unmerge(merged[index]))
    matching = times(lambda index: plan.update(tokens[index], Action.SELECT), lambda index: match(tokens[index]))
    return [
        row("tomesd_merge", shape, *merging, whole + few, tokens),
        row("tomesd_unmerge", shape, *unmerging, whole + few, tokens),
        row("tomesd_match", shape, *matching, whole, tokens),
    ]


if __name__ == "__main__":
    hard = [replace(shape, scale=float("inf"), assign="global") for shape in SHAPES]
    main(measure, "merge and unmerge", [*hard, *(shape for shape in PAPER if shape not in SHAPES)])
