"""Measuring candidates next to the original, on a tiny pipeline."""

from functools import partialmethod

import pytest
import torch
from run_folders import FACTS
from tiny_text import PROMPTS, text_pipeline
from toma_lab.metrics import Weights, open_metrics
from toma_lab.pipelines.generation import ImageRequest, generate_latents
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
    folder, items = meter().folder, meter().folder.plan.items
    assert turns_of(folder, three, items[:2]) == [
        (items[0], three[:2]),
        (items[0], three[2:]),
        (items[1], three[:2]),
        (items[1], three[2:]),
    ]
    meter().measure((items[0], three[:2]))
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
    found = candidates(pipe, "fast:computed=2;min_steps=1", "steps:2")
    measuring.measure((item, found))
    skipping, fewer = (measuring.folder.measurement(each, item).computed for each in found)
    assert skipping in ((0, 1), (0, 2))
    assert fewer is None


def test_a_candidate_that_fails_does_not_stop_the_others(pipe, meter, monkeypatch):
    measuring = meter()
    item, (broken, sound) = measuring.folder.plan.items[0], candidates(pipe, "steps:2", "steps:1")
    generate = measuring._generate

    def fail(variant, item):
        if variant == broken:
            raise RuntimeError("too large\nmore")
        return generate(variant, item)

    monkeypatch.setattr(measuring, "_generate", fail)
    measuring.measure((item, (broken, sound)))
    assert measuring.folder.measurement(broken, item).failure == "RuntimeError: too large"
    assert measuring.folder.measurement(sound, item).failure == ""


def test_compiled_and_then_as_before(pipe, meter, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    request = ImageRequest(PROMPTS[0], steps=STEPS)
    before = generate_latents(pipe, request)
    measuring = meter("blocks")
    item, (merged,) = measuring.folder.plan.items[0], candidates(pipe, "toma-stage@0.5")
    measuring.measure((item, (merged,)))
    found = measuring.folder.measurement(merged, item)
    assert (found.failure, found.psnr > 5) == ("", True)
    assert measuring.folder.image_path(ORIGINAL, item).exists()
    assert all(module._compiled_call_impl is None for module in pipe.unet.modules())
    assert torch.equal(generate_latents(pipe, request), before)
