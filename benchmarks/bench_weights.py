"""Weighing: similarity, softmax over destinations and row sums, or the index of a hard assignment."""

from dataclasses import replace

from operators import SHAPES, Shape, main, microseconds, ready_plans, row


def measure(shape: Shape) -> list[dict[str, object]]:
    tokens = shape.tokens()
    plan, reference = ready_plans(shape, tokens[0])
    assert plan.assignment is not None
    us, reference_us = (
        microseconds(lambda index, each=each: each.assignment.update(tokens[index % len(tokens)], each.destinations))  # type: ignore[misc]
        for each in (plan, reference)
    )
    moved = tokens[0].nbytes + sum(buffer.nbytes for buffer in plan.assignment.buffers())
    return [row("weights", shape, us, reference_us, moved, tokens)]


if __name__ == "__main__":
    hard = [replace(shape, scale=float("inf")) for shape in SHAPES]
    everywhere = [replace(shape, assign="global") for shape in (SHAPES[0], *hard[:1])]
    main(measure, "weights", [*hard, *everywhere])
