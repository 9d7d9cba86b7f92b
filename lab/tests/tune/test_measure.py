"""Measuring candidates next to the original, on a tiny pipeline."""

from functools import partialmethod

import pytest
import torch
from run_folders import FACTS
from tiny_clips import SIZE, clip_pipeline
from tiny_text import PROMPTS, text_pipeline
from toma_lab.metrics import Weights, open_metrics
from toma_lab.pipelines.clips import latents_of
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.tune.candidates import open_candidates
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.measure import Meter, turns_of
from toma_lab.tune.plan import TunePlan
from torch import nn

STEPS = 3


@pytest.fixture(scope="module")
def pipe():
    return text_pipeline()


@pytest.fixture
def meter(pipe, tmp_path):
    def make(compile="none"):
        plan = TunePlan(model="", model_class="", prompts=PROMPTS, steps=STEPS, compile=compile)
        folder = TuneFolder.start(tmp_path / compile, plan, FACTS)
        return Meter(folder, pipe, open_metrics(["psnr"], Weights(), torch.device("cpu")))

    return make


def candidates(pipe, *texts):
    return open_candidates(pipe.unet, texts, STEPS).columns


def test_turns_have_two_candidates_and_leave_out_what_is_measured(pipe, meter):
    three = candidates(pipe, "steps:2", "steps:1", "toma-stage@0.5")
    measuring = meter()
    folder, items = measuring.folder, measuring.folder.plan.items
    assert turns_of(folder, three, items[:2]) == [
        (items[0], three[:2]),
        (items[0], three[2:]),
        (items[1], three[:2]),
        (items[1], three[2:]),
    ]
    measuring.measure((items[0], three[:2]))
    assert turns_of(folder, three, items[:1]) == [(items[0], three[2:])]


def test_the_original_runs_between_the_two(pipe, meter):
    steps = []
    hook = pipe.unet.register_forward_pre_hook(lambda *_: steps.append(pipe.num_timesteps))
    measuring = meter()
    turn = (measuring.folder.plan.items[0], candidates(pipe, "steps:2", "steps:1"))
    measuring.measure(turn)
    first = len(steps)
    measuring.measure(turn)  # nothing is warmed up a second time
    hook.remove()
    assert steps[first:] == [2, 2, 3, 3, 3, 1]


def test_it_is_noted_which_steps_were_computed(pipe, meter):
    measuring = meter()
    item = measuring.folder.plan.items[0]
    found = candidates(pipe, "toma-late:computed=2;ratio=0.5", "steps:2")
    measuring.measure((item, found))
    skipping, fewer = (measuring.folder.item_row(each, item).get("computed_steps") for each in found)
    assert skipping in ([0, 1], [0, 2])
    assert fewer is None


class TestFailures:
    @pytest.fixture
    def failing(self, pipe, meter, monkeypatch):
        """Measures two candidates, of which the first raises an error."""
        measuring = meter()
        item, (broken, sound) = measuring.folder.plan.items[0], candidates(pipe, "steps:2", "steps:1")
        make = measuring.maker.make

        def measure(error):
            def fail(column, requests):
                if column == broken:
                    raise error
                return make(column, requests)

            monkeypatch.setattr(measuring.maker, "make", fail)
            measuring.measure((item, (broken, sound)))
            return measuring.folder, broken, sound, item

        return measure

    def test_no_memory_is_noted_and_tried_again_by_the_next_command(self, failing):
        folder, broken, sound, item = failing(torch.OutOfMemoryError("too large\nmore"))
        assert folder.item_row(broken, item)["failure"] == "OutOfMemoryError: too large"
        assert float(folder.item_row(sound, item)["psnr"]) > 5
        assert turns_of(folder, [broken, sound], [item]) == []
        assert turns_of(TuneFolder(folder.path), [broken, sound], [item]) == [(item, (broken,))]

    def test_a_bug_is_not_hidden(self, failing):
        with pytest.raises(AttributeError, match="no such thing"):
            failing(AttributeError("no such thing"))


def test_compiled_and_then_as_before(pipe, meter, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    request = ImageRequest(PROMPTS[0], steps=STEPS)
    before = latents_of(pipe, request)
    measuring = meter("blocks")
    item, (merged,) = measuring.folder.plan.items[0], candidates(pipe, "toma-stage@0.5")
    measuring.measure((item, (merged,)))
    found = measuring.folder.item_row(merged, item)
    assert ("failure" not in found, found["psnr"] > 5) == (True, True)
    assert measuring.folder.picture(ORIGINAL, item).exists()
    assert all(module._compiled_call_impl is None for module in pipe.unet.modules())
    assert torch.equal(latents_of(pipe, request), before)


def test_clips_are_warmed_up_with_few_steps(tmp_path):
    pipe, calls = clip_pipeline(), []
    size = {"clips": True, "frames": 5, "width": SIZE[0], "height": SIZE[1]}
    plan = TunePlan(model="", model_class="", prompts=PROMPTS, steps=6, **size)
    measuring = Meter(
        TuneFolder.start(tmp_path / "run", plan, FACTS),
        pipe,
        open_metrics(["psnr"], Weights(), torch.device("cpu"), clips=True),
    )
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(pipe.num_timesteps))
    measuring.maker.make(ORIGINAL, [measuring.request(ORIGINAL, plan.items[0])])
    hook.remove()
    assert calls == [4] * 2 * 4 + [6] * 2 * 6
