"""Every denoiser that diffusers exports can be skipped: it does not run, and its last output comes again."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version
from skipping import counts, skipping
from torch import nn
from torch.utils import _pytree as pytree
from zoo import ENTRIES, NOT_BUILT, WRITTEN_FOR, Entry, candidates


def test_each_is_built_or_named_with_the_reason() -> None:
    built = {entry.class_name for entry in ENTRIES}
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert not built & NOT_BUILT.keys()
    assert candidates() <= built | NOT_BUILT.keys(), "add these to ENTRIES, or to NOT_BUILT with a reason"
    if Version(diffusers.__version__) >= Version(WRITTEN_FOR):
        assert built | NOT_BUILT.keys() <= candidates(), "these names are of no denoiser any more"


def leaves_of(output: Any) -> list[Any]:
    return pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two outputs are of the same type and structure, and their tensors equal bit for bit."""
    if type(ours) is not type(theirs):
        return False
    ours, theirs = leaves_of(ours), leaves_of(theirs)
    return len(ours) == len(theirs) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else type(one) is type(other)
        for one, other in zip(ours, theirs, strict=True)
    )


def called(entry: Entry, model: nn.Module, seed: int) -> Any:
    inputs = entry.inputs(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    # WanAnimate2 compiles its attention, which takes ten seconds.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(**inputs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_skipped_steps_return_the_last_output(entry: Entry) -> None:
    torch.manual_seed(0)
    model = entry.build()
    attributes = set(vars(model))
    runs: list[int] = []
    counter = model.register_forward_hook(lambda *_: runs.append(step))
    handle = skipping(model, 0, 2)
    handle.begin(4)
    outputs = []
    for step in range(4):
        handle.step(step)
        outputs.append(called(entry, model, step))
    assert runs == [0, 2]
    assert counts(handle) == (2, 2)
    assert [same(outputs[1], outputs[step]) for step in range(4)] == [True, True, False, False]
    assert same(outputs[3], outputs[2])
    handle.remove()
    counter.remove()
    assert set(vars(model)) == attributes
    assert same(called(entry, model, 2), outputs[2])
