"""What a search of clips tries, and why not more, on a tiny pipeline."""

import pytest
import torch
from accelerate import PartialState
from diffusers import WanPipeline
from run_folders import FACTS
from tiny_clips import SIZE, clip_pipeline
from tiny_text import PROMPTS
from toma_lab.metrics import Weights, open_metrics
from toma_lab.tune.folder import ORIGINAL, TuneFolder
from toma_lab.tune.measure import Meter
from toma_lab.tune.plan import TunePlan
from toma_lab.tune.progress import SearchBar, in_time
from toma_lab.tune.run import _Work

STEPS = 10


class SilentPipeline(WanPipeline):
    """Like that of HunyuanVideo 1.5, it takes no callback."""

    def __call__(self, prompt, num_frames, width, height, num_inference_steps, generator, output_type):
        return super().__call__(
            prompt,
            num_frames=num_frames,
            width=width,
            height=height,
            num_inference_steps=num_inference_steps,
            generator=generator,
            output_type=output_type,
        )


@pytest.fixture
def work(tmp_path):
    def make(pipe, frames, **changes):
        size = {"clips": True, "frames": frames, "width": SIZE[0], "height": SIZE[1]}
        plan = TunePlan(model="", model_class="", prompts=PROMPTS, steps=STEPS, **size, **changes)
        folder = TuneFolder.start(tmp_path / "run", plan, FACTS)
        metrics = open_metrics(["psnr", "flicker"], Weights(), torch.device("cpu"), clips=True)
        return _Work(folder, Meter(folder, pipe, metrics), PartialState(cpu=True), SearchBar(None))

    return make


def titles(candidates):
    return {each.title for each in candidates.columns}


def test_merging_inside_frames_against_boxes(work):
    searching = work(clip_pipeline(), 9)
    found = searching.candidates(None)
    assert searching.prober._outputs == []  # nothing is remembered while candidates are measured
    assert {"toma-stage 0.5", "toma-stage 0.5, region_frames=1"} <= titles(found)
    assert not any("region_frames" in reason for reason in found.left_out)


def test_a_prime_number_of_frames_has_no_boxes(work):
    found = work(clip_pipeline(), 121).candidates(None)
    assert "toma-stage 0.5" in titles(found)
    assert not any("region_frames" in title for title in titles(found))
    assert "since the 31 frames of tokens cannot be divided into boxes" in found.left_out[-1]


def test_a_pipeline_that_does_not_report_its_steps_has_no_map(work):
    pipe = SilentPipeline(**clip_pipeline().components)
    pipe.set_progress_bar_config(disable=True)
    searching = work(pipe, 9)
    assert searching.draw_map() is None
    assert "a SilentPipeline does not say which step it is at" in searching.candidates(None).left_out[-1]


def test_warmed_up_with_few_steps(work):
    pipe, calls = clip_pipeline(), []
    meter = work(pipe, 5, methods=("steps:50%",)).meter
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(pipe.num_timesteps))
    meter.maker.make(ORIGINAL, [meter.request(ORIGINAL, meter.folder.plan.items[0])])
    hook.remove()
    assert calls == [4] * 2 * 4 + [STEPS] * 2 * STEPS


def test_times_in_words():
    assert [in_time(each) for each in (3.14159, 600, 5400)] == ["3.14 s", "10 min", "1.5 h"]
