"""Every denoiser that diffusers exports can be skipped: it does not run, and its last output comes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from zoo import ENTRIES, Entry

from toma_diffusion import Skip, apply_toma


def leaves_of(output: Any) -> list[Any]:
    return pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two outputs are of the same type and structure, and their tensors equal bit for bit."""
    ours, theirs = (leaves_of(output) for output in (ours, theirs))
    return len(ours) == len(theirs) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other)
        for one, other in zip(ours, theirs, strict=True)
    )


def called(entry: Entry, model: torch.nn.Module, seed: int, **more: Any) -> Any:
    inputs = entry.inputs(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    # WanAnimate2 compiles its attention, which takes ten seconds.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(**inputs, **more)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_skipped_steps_return_the_last_output(entry: Entry) -> None:
    torch.manual_seed(0)
    model = entry.build()
    attributes = set(vars(model))
    expected = {step: called(entry, model, step) for step in (0, 2)}
    runs: list[int] = []
    counter = model.register_forward_hook(lambda *_: runs.append(step))

    handle = apply_toma(model, ratio=0, skip=Skip(computed=(0, 2)))
    handle.begin(4)
    for step in range(4):
        handle.step(step)
        output = called(entry, model, step)
        last = expected[step - step % 2]
        assert type(output) is type(last)
        assert same(output, last)
    assert runs == [0, 2]
    assert handle.summary().steps == (2, 2)

    handle.remove()
    counter.remove()
    assert set(vars(model)) == attributes
    assert same(called(entry, model, 2), expected[2])
