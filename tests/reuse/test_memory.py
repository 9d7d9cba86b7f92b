"""What is remembered of earlier steps, and what it says about later ones."""

import pytest
import torch

from toma_diffusion.core.memory import Memory

SHAPES = [[(2, 6, 4)], [(2, 3, 4), (2, 5, 4)]]
"""Of two parts, the second with two streams."""


def line(step: float) -> list[list[torch.Tensor]]:
    """Changes that are linear in the step."""
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator, dtype=torch.float64)
            + step * torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in shapes
        ]
        for shapes in SHAPES
    ]


def memory(order: float) -> Memory:
    made = Memory(SHAPES, lines=order > 0, dtype=torch.float64)
    made.order = order
    return made


def compute(memory: Memory, step: int, changes=None) -> None:
    memory.compute(step)
    for part, each in zip(memory.parts, changes or line(step), strict=True):
        part.store(each)


def recall(memory: Memory, step: int) -> list[list[torch.Tensor]]:
    memory.reuse(step)
    return [part.recall() for part in memory.parts]


def equal(ours, theirs) -> bool:
    return all(torch.equal(*pair) for pair in zip(flat(ours), flat(theirs), strict=True))


def flat(changes) -> list[torch.Tensor]:
    return [change for of_part in changes for change in of_part]


def same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [(0, 1), (0, 3), (0, 1, 5), (0, 5, 6), (2, 4, 5, 9)], ids=str)
@pytest.mark.parametrize("ahead", [1, 4])
def test_order_1_is_exact_on_lines(steps, ahead):
    """Also for uneven distances between computed steps."""
    remembered = memory(order=1)
    for step in steps:
        compute(remembered, step)
    same(recall(remembered, steps[-1] + ahead), line(steps[-1] + ahead))


def test_order_1_follows_the_last_two_alone():
    remembered = memory(order=1)
    compute(remembered, 0, [[torch.full_like(change, 9) for change in of_part] for of_part in line(0)])
    compute(remembered, 2)
    compute(remembered, 5)
    same(recall(remembered, 7), line(7))


@pytest.mark.parametrize("steps", [(0,), (0, 1, 5)], ids=str)
def test_order_0_copies(steps):
    remembered = memory(order=0)
    for step in steps:
        compute(remembered, step)
    for step in (6, 9):
        assert equal(recall(remembered, step), line(steps[-1]))


@pytest.mark.parametrize("order", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("steps", [(0, 1), (0, 1, 5)], ids=str)
def test_an_order_between_goes_that_share_of_the_way(order, steps):
    remembered = memory(order)
    for step in steps:
        compute(remembered, step)
    last = steps[-1]
    same(recall(remembered, last + 4), line(last + 4 * order))


def test_the_order_may_change_from_call_to_call():
    """Another number of steps may follow lines less far, in the same buffers."""
    remembered = memory(order=1)
    for step in (0, 2):
        compute(remembered, step)
    same(recall(remembered, 4), line(4))
    remembered.order = 0.0
    assert equal(recall(remembered, 4), line(2))


def test_order_1_copies_after_one_computed_step():
    remembered = memory(order=1)
    compute(remembered, 0)
    assert equal(recall(remembered, 3), line(0))


def test_a_step_computed_twice_counts_once():
    """The second time its distance to the step before it is still known."""
    remembered = memory(order=1)
    compute(remembered, 0)
    compute(remembered, 3)
    remembered.compute(3)
    assert remembered.per_step == pytest.approx(1 / 3)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_generation(order, value):
    remembered = memory(order)
    broken = [[torch.full_like(change, value) for change in of_part] for of_part in line(0)]
    for step in (0, 1):
        compute(remembered, step, broken)
    remembered.forget()
    compute(remembered, 0)
    same(recall(remembered, 1), line(0))
    compute(remembered, 2)
    same(recall(remembered, 3), line(3 if order else 2))


def test_after_forgetting_there_is_nothing_to_reuse():
    remembered = memory(order=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="step 4 has nothing to reuse"):
            remembered.reuse(4)
        compute(remembered, 0)
        remembered.forget()


@pytest.mark.parametrize("order", [0, 1])
def test_addresses_never_change(order):
    remembered = memory(order)
    before = [buffer.data_ptr() for buffer in remembered.buffers]
    assert len(set(before)) == len(before) == 3 * (1 + order) + 2
    for _ in range(2):
        for step in (0, 1, 4):
            compute(remembered, step)
            recall(remembered, step + 1)
        remembered.forget()
    assert [buffer.data_ptr() for buffer in remembered.buffers] == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_so(dtype):
    remembered = Memory([[(1, 4, 4)]], lines=True, dtype=dtype)
    for step in (0, 1):
        remembered.compute(step)
        remembered.parts[0].store([torch.full((1, 4, 4), 1.0 + step, dtype=dtype)])
    remembered.reuse(3)
    (recalled,) = remembered.parts[0].recall()
    assert recalled.dtype == dtype
    assert torch.equal(recalled, torch.full((1, 4, 4), 4.0, dtype=dtype))


@pytest.mark.parametrize("order", [0, 1])
def test_no_gradients_are_kept(order):
    """They would lead into the graph of an earlier step, which is freed."""
    remembered = Memory([[(1, 4, 4)]], lines=order > 0)
    remembered.compute(0)
    remembered.parts[0].store([torch.randn(1, 4, 4, requires_grad=True) * 2])
    assert not any(buffer.requires_grad for buffer in remembered.buffers)
