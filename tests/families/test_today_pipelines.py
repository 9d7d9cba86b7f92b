"""Real pipelines of the newest families: the step comes from their scheduler, guidance chooses together, a preset may
depend on the number of steps."""

import pytest
import torch
from observe import attention_lengths, state_of
from pairs import named
from test_pipelines import READS, Trace
from tiny import ONE_PLAN, PLAIN, STRIDED
from tiny_pipelines_today import PIPELINES, TinyPipeline

from toma_diffusion import Skip, ToMAConfig, apply_toma, remove_toma

pipelines = pytest.mark.parametrize("tiny", PIPELINES, ids=named)
every_guidance = pytest.mark.parametrize(
    ("tiny", "guided"),
    [
        pytest.param(tiny, guided, id=f"{tiny.name}-{'guided' if guided else 'plain'}")
        for tiny in PIPELINES
        for guided in (False, True)
        if (tiny.guided or not guided) and (tiny.name != "qwen-edit" or guided)  # it encodes a large picture: once
    ],
)


def traced(tiny: TinyPipeline, pipe, steps: int, guided: bool = False) -> Trace:
    with Trace(pipe) as trace:
        tiny.run(pipe, steps, guided)
    return trace


@every_guidance
def test_the_step_is_read_from_the_scheduler(tiny, guided):
    """In two generations. Of two passes over a step, the second uses the plans of the first."""
    pipe = tiny.build()
    apply_toma(pipe, PLAIN, **ONE_PLAN | {"guidance_parts": "auto"}, select_every=3, reweigh_every=3)
    for _ in range(2):
        trace = traced(tiny, pipe, 5, guided)
        assert len(trace.calls) == len(tiny.calls(list(range(5)), guided))
        first = [tiny.calls([step], guided)[0] for step in (0, 3)]
        assert trace.where("facility_location") == first
        assert trace.where("merge") == tiny.calls(list(range(5)), guided)
        tick = state_of(pipe.transformer)._last_tick
        assert (tick.step, tick.num_steps, tick.is_exact) == (4, 5, True)


@every_guidance
def test_a_window_opens_where_it_should(tiny, guided):
    pipe = tiny.build()
    plain = tiny.run(pipe, 4, guided)
    apply_toma(pipe, PLAIN, **STRIDED, window=(0.5, 1.0))
    assert traced(tiny, pipe, 4, guided).where("merge") == tiny.calls([2, 3], guided)
    merged = tiny.run(pipe, 4, guided)
    assert merged.isfinite().all()
    assert not torch.allclose(merged, plain, atol=1e-3)
    remove_toma(pipe)
    assert torch.equal(tiny.run(pipe, 4, guided), plain)


@pytest.mark.parametrize("tiny", [tiny for tiny in PIPELINES if tiny.guided], ids=named)
def test_guidance_chooses_together(tiny):
    """Two halves of a batch of two pictures, or two passes."""
    pipe = tiny.build()
    handle = apply_toma(pipe, PLAIN, **ONE_PLAN | {"guidance_parts": "auto"}, select_every=1, reweigh_every=1)
    chosen = []
    look = pipe.transformer.register_forward_hook(
        lambda *_: chosen.append([plan.positions.clone() for plan in state_of(pipe.transformer).current.values()])
    )
    tiny.run(pipe, 2, guided=True, prompts=2)
    look.remove()
    if tiny.batched:
        assert len(chosen) == 2
        assert all(torch.equal(*positions.chunk(2)) for step in chosen for positions in step)
        assert "2 parts of guidance choose together" in str(handle.summary())
    else:
        assert len(chosen) == 4
        for first, second in zip(chosen[::2], chosen[1::2], strict=True):
            assert all(map(torch.equal, first, second))
        assert "passes over one sample share a plan" in str(handle.summary())
    assert not all(map(torch.equal, chosen[0], chosen[-1]))


@pipelines
def test_balanced_goes_by_the_number_of_steps(tiny):
    """Four steps merge tokens, in their second half; of eight two are skipped, and nothing is merged."""
    pipe = tiny.build()
    handle = apply_toma(pipe, num_regions=4, min_tokens=0, skip_blocks=())
    assert "defaults of this model family" in str(handle.summary())
    trace = traced(tiny, pipe, 4)
    assert trace.where("merge") == [2, 3]
    assert handle.summary().steps == (4, 0)
    trace = traced(tiny, pipe, 8)
    assert trace.where("merge") == []
    assert handle.summary().steps == (6, 2)


@pytest.mark.parametrize("tiny", [tiny for tiny in PIPELINES if tiny.name != "qwen-edit"], ids=named)
def test_skipped_steps_run_no_block(tiny):
    pipe = tiny.build()
    plain = tiny.run(pipe, 6)
    whole = len(attention_lengths(lambda: tiny.run(pipe, 6)))
    handle = apply_toma(pipe, ToMAConfig(ratio=0, skip=Skip(computed=4)))
    image = tiny.run(pipe, 6)
    assert image.isfinite().all()
    assert not torch.equal(image, plain)
    assert handle.summary().steps == (4, 2)
    assert len(attention_lengths(lambda: tiny.run(pipe, 6))) < whole
    remove_toma(pipe)
    assert torch.equal(tiny.run(pipe, 6), plain)


@pipelines
def test_no_value_is_read_after_the_first_step(tiny):
    """Reading one would wait for the GPU."""
    pipe, guided = tiny.build(), bool(tiny.guided)
    plain = traced(tiny, pipe, 3, guided)
    apply_toma(pipe, PLAIN, **STRIDED, select_every=2, reweigh_every=1)
    merged = traced(tiny, pipe, 3, guided)
    assert merged.where("merge")
    for ours, theirs in list(zip(merged.calls, plain.calls, strict=True))[1:]:
        assert {name: ours[name] for name in READS} == {name: theirs[name] for name in READS}
