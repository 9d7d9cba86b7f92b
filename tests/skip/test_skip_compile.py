"""Skipped steps stand in front of torch.compile: compiled code is not entered, and there is no graph more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from observe import Graphs
from pairs import named
from peft import LoraConfig
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from skipping import BY_NAME, FOLLOWED, call, counts, generate, skipping
from torch import nn

from toma_diffusion import Handle, Merge, Skip, speed_up

FLUX = BY_NAME["flux"]


class Entered(Graphs):
    """Counts also how often compiled code runs."""

    runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        compiled = super().__call__(graph, inputs)

        def counted(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return torch.compiler.disable(counted)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def by_block(model: Any, **options: Any) -> nn.Module:
    model.compile_repeated_blocks(**options)
    return model


Form = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def shallow() -> Any:
    return FLUX.build(num_layers=1, num_single_layers=0)


def assert_as_computed(model: nn.Module, handle: Handle) -> None:
    """Steps 0 and 2 are those of a plain model, and each is followed by a skipped one."""
    for seed in (0, 9):
        outputs = generate(FLUX, model, handle, seed=seed)
        plain = shallow()
        whole = [call(FLUX, plain, seed + step) for step in FOLLOWED]
        torch.testing.assert_close(torch.stack(outputs), torch.stack(whole))
        assert counts(handle) == (2, 2)


@pytest.mark.parametrize(
    ("form", "skip_first"),
    [(wrapped, True), (wrapped, False), (in_place, True), (in_place, False), (by_block, False)],
    ids=named,
)
def test_whoever_compiles(form: Form, skip_first: bool) -> None:
    """There is one graph, entered as often as steps are computed."""
    entered, model = Entered(), shallow()
    handle = skipping(model, 0, 2) if skip_first else None
    compiled = form(model, fullgraph=True, backend=entered)
    handle = handle or skipping(compiled, 0, 2)
    assert_as_computed(compiled, handle)
    assert (entered.count, entered.runs) == (1, 4)  # two generations, of which each computes two steps
    with torch.compiler.set_stance("fail_on_recompile"):
        for change in (lambda: setattr(handle, "enabled", False), handle.remove):
            change()
            torch.testing.assert_close(call(FLUX, compiled), call(FLUX, shallow()))
    assert entered.runs == 4 + 2


@pytest.mark.parametrize("mode", ["whole", "blocks"])
def test_through_the_handle(mode: str) -> None:
    entered = Entered()
    model = shallow()
    handle = skipping(model, 0, 2)
    handle.compile(mode, backend=entered)
    assert_as_computed(model, handle)
    assert entered.runs == 4
    handle.remove()
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert torch.equal(call(FLUX, model), call(FLUX, shallow()))
    assert entered.runs == 4


def test_merging_in_computed_steps_has_no_graph_more() -> None:
    """One for each of the two kinds of merged steps, as without skipped steps."""
    graphs = Graphs()
    model = torch.compile(shallow(), fullgraph=True, backend=graphs)
    merge = Merge(num_regions=4, skip_blocks=(), select_every=2)
    handle = speed_up(model, merge=merge, skip=Skip(computed=(0, 1)))
    generate(FLUX, model, handle)
    with torch.compiler.set_stance("fail_on_recompile"):
        generate(FLUX, model, handle)
    assert graphs.count == 2


def test_peft_sees_whether_a_model_is_compiled() -> None:
    """It refuses to make adapters exchangeable in a model that is."""
    model = shallow()
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    handle = skipping(model, 0, 2)
    prepare_model_for_compiled_hotswap(model, target_rank=4)
    model.compile(backend="eager")
    generate(FLUX, model, handle, 2)
    with pytest.raises(ValueError, match="before"):
        prepare_model_for_compiled_hotswap(model, target_rank=4)


@pytest.mark.parametrize("form", [None, wrapped])
def test_a_deleted_model_frees_its_memory(form: Form | None) -> None:
    """At once if it is not compiled; torch itself leaves what it compiled to the garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = shallow()
        compiled = model if form is None else form(model, backend="eager")
        handle = skipping(compiled, 0, 2)
        generate(FLUX, compiled, handle)
        reference = weakref.ref(model)
        del model, compiled, handle
        if form is not None:
            gc.collect()
        assert reference() is None
    finally:
        gc.enable()
