"""Skipped steps stand in front of torch.compile: compiled code is not entered, and there is no graph more."""

from __future__ import annotations

import copy
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
from skipping import BY_NAME, call, generate, only_skip
from tiny import STRIDED, Family
from tiny_pipelines import flux_pipeline, run
from torch import nn

from toma_diffusion import Skip, ToMAHandle, apply_toma

FLUX, SD15 = BY_NAME["flux"], BY_NAME["sd15"]
MERGED = STRIDED | {"select_every": 2, "reweigh_every": 2}
"""Two kinds of merged steps, to compile less."""


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


def shallow(family: Family) -> nn.Module:
    return family.build(**family.shallow)


def as_computed(family: Family, model: nn.Module, handle: ToMAHandle) -> None:
    """Steps 0 and 2 are those of a plain model, and each is followed by a skipped one."""
    for seed in (0, 9):
        outputs = generate(family, model, handle, 4, seed)
        whole = [call(family, shallow(family), seed + step) for step in (0, 0, 2, 2)]
        torch.testing.assert_close(torch.stack(outputs), torch.stack(whole))
        assert handle.summary().steps == (2, 2)


@pytest.mark.parametrize(
    ("family", "form", "skip_first"),
    [
        (FLUX, wrapped, True),
        (FLUX, wrapped, False),
        (FLUX, in_place, True),
        (FLUX, in_place, False),
        (FLUX, by_block, False),
        (SD15, wrapped, True),
        (SD15, by_block, True),
    ],
    ids=named,
)
def test_whoever_compiles(family: Family, form: Form, skip_first: bool) -> None:
    """As many graphs as without skipped steps, entered as often as steps are computed."""
    alone, together = Entered(), Entered()
    compiled = form(shallow(family), fullgraph=True, backend=alone)
    for seed in range(4):
        call(family, compiled, seed)
    torch.compiler.reset()

    model = shallow(family)
    handle = apply_toma(model, only_skip(0, 2)) if skip_first else None
    compiled = form(model, fullgraph=True, backend=together)
    handle = handle or apply_toma(compiled, only_skip(0, 2))
    as_computed(family, compiled, handle)  # two generations, of which each computes two steps
    assert together.count == alone.count
    assert together.runs == alone.runs

    handle.remove()
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(call(family, compiled), call(family, shallow(family)))
    assert together.runs == alone.runs + alone.runs // 4


@pytest.mark.parametrize("mode", ["whole", "blocks"])
def test_through_the_handle(mode: str) -> None:
    entered = Entered()
    model = shallow(FLUX)
    handle = apply_toma(model, only_skip(0, 2))
    handle.compile(mode, backend=entered)
    as_computed(FLUX, model, handle)
    parts = 1 if mode == "whole" else len(model.transformer_blocks) + len(model.single_transformer_blocks)
    assert entered.runs == 4 * parts
    handle.remove()
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert torch.equal(call(FLUX, model), call(FLUX, shallow(FLUX)))
    assert entered.runs == 4 * parts


def test_merging_in_computed_steps_has_no_graph_more() -> None:
    counts = []
    for skip in (None, Skip(computed=(0, 1))):
        graphs = Graphs()
        model = torch.compile(shallow(FLUX), fullgraph=True, backend=graphs)
        handle = apply_toma(model, **MERGED, skip=skip)
        generate(FLUX, model, handle, 4)
        with torch.compiler.set_stance("fail_on_recompile"):
            generate(FLUX, model, handle, 4)
        counts.append(graphs.count)
    assert counts == [2, 2]


def test_in_a_pipeline_with_two_passes() -> None:
    """Switched off and on again, too."""
    entered = Entered()
    pipe, eager = flux_pipeline(), flux_pipeline()
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=entered)
    arguments = {"num_inference_steps": 4, "true_cfg_scale": 3.0}
    handles = [apply_toma(each, only_skip(0, 2)) for each in (pipe, eager)]
    assert torch.equal(run(pipe, **arguments), run(eager, **arguments))
    assert (entered.count, entered.runs) == (1, 4)
    with torch.compiler.set_stance("fail_on_recompile"):
        for handle in handles:
            handle.enabled = False
        assert torch.equal(run(pipe, **arguments), run(eager, **arguments))
        assert entered.runs == 4 + 8
        handles[0].enabled = True
        run(pipe, **arguments)
    assert entered.runs == 4 + 8 + 4


@pytest.mark.parametrize("form", [wrapped, in_place])
def test_a_copy_skips_for_itself(form: Form) -> None:
    model = shallow(FLUX)
    compiled = form(model, fullgraph=True, backend="eager")
    handle = apply_toma(compiled, only_skip(0, 2))
    generate(FLUX, compiled, handle, 4)
    twin = copy.deepcopy(compiled)
    as_computed(FLUX, twin, ToMAHandle(getattr(twin, "_orig_mod", twin)))
    as_computed(FLUX, compiled, handle)


def test_peft_sees_whether_a_model_is_compiled() -> None:
    """It refuses to make adapters exchangeable in a model that is."""
    model = shallow(FLUX)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    handle = apply_toma(model, only_skip(0, 2))
    prepare_model_for_compiled_hotswap(model, target_rank=4)
    model.compile(backend="eager")
    generate(FLUX, model, handle, 2)
    with pytest.raises(ValueError, match="before"):
        prepare_model_for_compiled_hotswap(model, target_rank=4)


@pytest.mark.parametrize("form", [None, wrapped, in_place])
def test_a_deleted_model_frees_its_memory(form: Form | None) -> None:
    """At once if it is not compiled; torch itself leaves what it compiled to the garbage collection."""
    gc.collect()
    gc.disable()
    try:
        model = shallow(FLUX)
        compiled = model if form is None else form(model, backend="eager")
        handle = apply_toma(compiled, only_skip(0, 2))
        generate(FLUX, compiled, handle, 4)
        reference = weakref.ref(model)
        del model, compiled, handle
        if form is not None:
            gc.collect()
        assert reference() is None
    finally:
        gc.enable()
