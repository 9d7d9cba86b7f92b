"""Choosing destinations: similarity and greedy loop, by the kernel and by the loop in plain torch."""

from operators import Shape, main, microseconds, ready_plans, row


def measure(shape: Shape) -> list[dict[str, object]]:
    tokens = shape.tokens()
    plan, reference = ready_plans(shape, tokens[0])
    us, reference_us = (
        microseconds(lambda index, each=each: each.choose(tokens[index % len(tokens)]))  # type: ignore[misc]
        for each in (plan, reference)
    )
    return [row("facility_location", shape, us, reference_us, tokens[0].nbytes, tokens)]


if __name__ == "__main__":
    main(measure, "facility location")
