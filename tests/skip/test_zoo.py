from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.utils import _pytree as pytree
from zoo import ENTRIES, NOT_BUILT, WRITTEN_FOR, Entry, candidates

EVERY_ENTRY = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_every_denoiser_of_diffusers_is_built_or_has_a_reason() -> None:
    built = {entry.class_name for entry in ENTRIES}
    assert not built & NOT_BUILT.keys()
    assert candidates() <= built | NOT_BUILT.keys(), "add these to ENTRIES, or to NOT_BUILT with a reason"


@pytest.mark.skipif(Version(diffusers.__version__) < Version(WRITTEN_FOR), reason="an older diffusers lacks classes")
def test_no_name_is_stale() -> None:
    assert {entry.class_name for entry in ENTRIES} | NOT_BUILT.keys() <= candidates()


def test_every_entry_has_a_name_of_its_own() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def built(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    return entry.build()


def called(entry: Entry, model: nn.Module, inputs: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    """All tensors of the output."""
    torch.manual_seed(2)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # one model compiles its attention
        output = model(**inputs, **more)
    leaves = pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, change, value)


def another(sample: torch.Tensor) -> torch.Tensor:
    return -sample if sample.is_floating_point() else sample.flip(-1)


def half(time: torch.Tensor) -> torch.Tensor:
    return time / 2 if time.is_floating_point() else time // 2


def differ(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return any(not torch.allclose(one, other, rtol=1e-3, atol=1e-5) for one, other in zip(first, second, strict=True))


@EVERY_ENTRY
def test_models_are_tiny_and_the_seed_decides_their_values(entry: Entry) -> None:
    model, again = built(entry).state_dict(), built(entry).state_dict()
    assert sum(value.numel() for value in model.values()) < 5_000_000  # a projection of HunyuanImage is 2048 wide
    assert all(torch.equal(value, again[name]) for name, value in model.items())


@EVERY_ENTRY
def test_output_depends_on_sample_and_time(entry: Entry) -> None:
    model = built(entry)

    def inputs() -> dict[str, Any]:
        return entry.inputs(torch.Generator().manual_seed(1))

    outputs = called(entry, model, inputs())
    assert outputs
    for output in outputs:
        assert output.dtype == torch.float32
        assert output.isfinite().all()
        assert output.any()
    assert not differ(outputs, called(entry, model, inputs())), "a second call gives something else"
    other_sample = inputs() | {entry.sample: changed(inputs()[entry.sample], another)}
    assert differ(outputs, called(entry, model, other_sample))
    if entry.time:
        other_time = inputs() | {entry.time: changed(inputs()[entry.time], half)}
        assert differ(outputs, called(entry, model, other_time))
    if "return_dict" in signature(model.forward).parameters:
        as_tuple = called(entry, model, inputs(), return_dict=False)
        assert not differ(outputs, as_tuple)
