"""Merging and reuse in one configuration: every step is whole, merged or reused, as the schedule says."""

import pytest
import torch
from observe import attention_lengths
from pairs import named, pairwise
from parts import ATTENTION_OUTSIDE, BY_NAME, call, generate, own_forwards, plain
from tiny import STRIDED
from tiny_today import EVERY_FAMILY

from toma_diffusion import Reuse, apply_toma, remove_toma

EVERY = {"select_every": 1, "reweigh_every": 1}


def lengths_by_step(family, model, handle, steps: int) -> list[list[tuple[int, int]]]:
    handle.begin(steps)
    seen = []
    for step in range(steps):
        handle.step(step)
        seen.append(attention_lengths(lambda step=step: call(family, model, step)))
    return seen


@pytest.mark.parametrize(("family", "scope"), pairwise(EVERY_FAMILY, ("module", "block", "stage")), ids=named)
def test_whole_merged_and_reused_steps(family, scope):
    model = family.build()
    whole = attention_lengths(lambda: call(family, model))
    apply_toma(model, **STRIDED | EVERY, scope=scope)
    merged = attention_lengths(lambda: call(family, model))
    remove_toma(model)
    settings = STRIDED | EVERY | {"scope": scope, "window": (0.5, 1.0)}
    handle = apply_toma(model, **settings, reuse=Reuse(computed=(0, 2, 3, 5)))
    reused = whole[: ATTENTION_OUTSIDE.get(family.name, 0)]
    assert lengths_by_step(family, model, handle, 6) == [whole, reused, whole, merged, reused, merged]
    assert whole != merged
    assert handle.summary().steps == (4, 2)
    remove_toma(model)
    assert not own_forwards(model)
    assert torch.equal(call(family, model), plain(family, 1)[0])


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=named)
def test_a_merged_step_is_as_without_reuse(family):
    """And what is reused is the change of the merged blocks."""
    settings = STRIDED | EVERY | {"scope": "stage"}
    model, other = family.build(), family.build()
    handle = apply_toma(model, **settings, reuse=Reuse(computed=(0, 2), order=0))
    outputs = generate(family, model, handle, 4)
    without = generate(family, other, apply_toma(other, **settings), 4)
    assert [torch.equal(*pair) for pair in zip(outputs, without, strict=True)] == [True, False, True, False]


@pytest.mark.parametrize("method", ["tomesd", "tofu", "todo"])
def test_other_methods(method):
    family = BY_NAME["sd15"]
    settings = {"ratio": 0.75} | ({} if method == "todo" else {"random": False})
    model, other = family.build(), family.build()
    handle = apply_toma(model, method, **settings, computed=(0, 2), order=0)
    outputs = generate(family, model, handle, 4)
    without = generate(family, other, apply_toma(other, method, **settings), 4)
    assert [torch.equal(*pair) for pair in zip(outputs, without, strict=True)] == [True, False, True, False]


def test_deep_with_merging():
    """Merged blocks lie below the first level, and inside it."""
    family = BY_NAME["sd15"]
    model = family.build()
    handle = apply_toma(model, **STRIDED | EVERY, scope="block", reuse=Reuse(computed=(0, 2), part="deep"))
    seen = lengths_by_step(family, model, handle, 4)
    assert seen[1] == seen[3] == []
    assert {query for query, _ in seen[0]} == {query for query, _ in seen[2]} == {128, 32}
