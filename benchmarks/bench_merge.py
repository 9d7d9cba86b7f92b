"""Merging and unmerging, unmerging onto a residual, of local regions and with hard assignment."""

from collections.abc import Callable
from dataclasses import replace

import torch
from ops import SHAPES, Shape, main, microseconds, ready_plans, row
from torch import Tensor

from toma_diffusion import MergePlan


def measure(shape: Shape) -> list[dict[str, object]]:
    tokens = shape.tokens()
    plans = ready_plans(shape, tokens[0])
    merged = [torch.randn_like(plans[0].merge(each)) for each in tokens]
    whole, few = tokens[0].nbytes, merged[0].nbytes
    matrix = sum(buffer.nbytes for buffer in plans[0].mapping.buffers()) // 2

    def times(call: Callable[[MergePlan, Tensor, Tensor], object]) -> tuple[float, float]:
        turn = len(tokens)
        ours, theirs = (
            microseconds(lambda index, plan=plan: call(plan, tokens[index % turn], merged[index % turn]))  # type: ignore[misc]
            for plan in plans
        )
        return ours, theirs

    hard = "_hard" if shape.scale == float("inf") else ""
    return [
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


if __name__ == "__main__":
    hard = [replace(shape, scale=float("inf"), assign="global") for shape in SHAPES]
    main(measure, "merge and unmerge", hard)
