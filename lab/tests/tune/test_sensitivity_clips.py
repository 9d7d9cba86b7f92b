"""The growth of errors in clips: over frames, of two denoisers that take turns, and of every family of video models."""

import pytest
import torch
from tiny_clips import FRAMES, SIZE, clip_pipeline
from toma_lab.pipelines.clips import ClipRequest, latents_of
from toma_lab.tune.sensitivity import Prober, smooth_noise

from toma_diffusion.merge import Grid

REQUEST = ClipRequest("a red apple", steps=4, width=SIZE[0], height=SIZE[1], frames=FRAMES)


def test_an_error_is_smooth_over_frames_too():
    noise = smooth_noise((1, 3 + 512, 5), Grid(8, 8, 8), None, seed=0)
    assert not noise[:, :3].any()
    clip = noise[0, 3:].view(8, 8, 8, 5)
    for side in range(3):
        assert clip.diff(dim=side).norm() < 0.7 * clip.norm()
    assert clip.diff(dim=0).norm() > 0


@pytest.mark.parametrize("kind", ["text", "two"])
class TestWan:
    def test_remembered_steps_change_nothing_and_are_not_computed(self, kind):
        pipe = clip_pipeline(kind)
        prober, computing = Prober(pipe, REQUEST), Prober(pipe, REQUEST)
        prober.original()
        calls = []
        hooks = [model.blocks[0].register_forward_hook(lambda *_: calls.append(1)) for model in prober.models]
        growth = prober.growth((0,), 2)
        for hook in hooks:
            hook.remove()
        assert len(calls) == 2 * 2  # two steps of two passes
        computing.original()
        computing._outputs = [[] for _ in range(5)]  # nothing is remembered: all steps are computed
        assert computing.growth((0,), 2) == growth > 0

    def test_the_model_is_what_it_was(self, kind):
        pipe = clip_pipeline(kind)
        before = latents_of(pipe, REQUEST)
        Prober(pipe, REQUEST).growth((0, 1), 1)
        assert torch.equal(latents_of(pipe, REQUEST), before)

    def test_the_grid_is_known_before_and_after(self, kind):
        prober = Prober(clip_pipeline(kind), REQUEST)
        assert prober.grid == Grid(3, 4, 3)
        assert prober.growth((0,), 3) > 0
        assert prober.grid == Grid(3, 4, 3)


def test_an_error_is_made_by_the_denoiser_whose_step_it_is():
    pipe = clip_pipeline("two")
    prober = Prober(pipe, REQUEST)
    grown = [prober.growth((0,), step) for step in (1, 2)]  # the last step of the first, the first of the second
    pipe.transformer_2.blocks[0].requires_grad_(False)
    for parameter in pipe.transformer_2.blocks[0].parameters():
        parameter.zero_()  # it changes nothing then, and its error is a share of that
    changed = Prober(pipe, REQUEST)
    assert changed.growth((0,), 1) > 0.1 * grown[0]
    assert changed.growth((0,), 2) < 1e-3 * grown[1]
