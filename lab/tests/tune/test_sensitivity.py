"""The growth of errors: measured on a tiny pipeline, and what candidates are made from it."""

from dataclasses import replace

import pytest
import torch
from tiny_checkpoints import checkpoint
from tiny_text import text_pipeline
from toma_lab.pipelines.checkpoints import load_pipeline
from toma_lab.pipelines.clips import latents_of
from toma_lab.pipelines.generation import ImageRequest
from toma_lab.tune.candidates import MADE_FROM_MAP, from_map
from toma_lab.tune.sensitivity import Prober, SensitivityMap, groups_of, sampled_steps, smooth_noise

from toma_diffusion.merge import Grid

REQUEST = ImageRequest("a red apple", steps=4)


@pytest.fixture(scope="module")
def pipe():
    return text_pipeline()


class TestMeasured:
    def test_remembered_steps_change_nothing(self, pipe):
        prober, computing = Prober(pipe, REQUEST), Prober(pipe, REQUEST)
        growth = prober.growth((0,), 2)
        computing.growth((0,), 0)
        computing._outputs = [[] for _ in range(5)]  # nothing is remembered: all steps are computed
        assert computing.growth((0,), 2) == growth > 0

    def test_steps_before_the_error_are_not_computed(self, pipe):
        prober = Prober(pipe, REQUEST)
        prober.growth((0,), 0)
        computed = []
        hook = prober.blocks[0].module.register_forward_hook(lambda *_: computed.append(1))
        prober.growth((0,), 3)
        hook.remove()
        assert len(computed) == 1

    def test_the_model_is_what_it_was(self, pipe):
        before = latents_of(pipe, REQUEST)
        Prober(pipe, REQUEST).growth((0, 1), 1)
        assert torch.equal(latents_of(pipe, REQUEST), before)
        assert "forward" not in vars(pipe.unet)

    def test_a_block_with_two_streams(self):
        pipe = load_pipeline(str(checkpoint("flux")), "cpu")
        prober = Prober(pipe, ImageRequest("a red apple", steps=2, width=64, height=64))
        joint, single = prober.growth((0,), 1), prober.growth((11,), 1)
        assert joint > 0
        assert single > 0


def test_an_error_is_smooth_and_spares_the_text():
    noise = smooth_noise((2, 3 + 64, 5), Grid(8, 8), None, seed=0)
    assert noise.shape == (2, 67, 5)
    assert torch.equal(noise[0], noise[1])
    assert not noise[:, :3].any()
    image = noise[0, 3:].view(8, 8, 5)
    assert (image[:, 1:] - image[:, :-1]).norm() < 0.7 * image.norm()


class TestGroupsAndSteps:
    def test_groups_are_even_and_whole(self):
        assert groups_of(5, 12) == [(0,), (1,), (2,), (3,), (4,)]
        assert groups_of(14, 4) == [(0, 1, 2), (3, 4, 5, 6), (7, 8, 9), (10, 11, 12, 13)]

    def test_steps_hold_the_first_and_the_last(self):
        assert sampled_steps(20, 4) == (0, 6, 13, 19)
        assert sampled_steps(3, 8) == (0, 1, 2)


MAP = SensitivityMap(
    groups=((0, 1), (2, 3), (4, 5), (6, 7)),
    names=("a", "b", "c", "d"),
    steps=(0, 6, 13, 19),
    num_steps=20,
    growth=((4.0, 2.0, 1.0, 1.0), (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 0.1, 0.1), (6.0, 3.0, 2.0, 1.0)),
)


class TestCandidates:
    def test_the_most_sensitive_blocks(self):
        assert MAP.most_sensitive(0.25) == (6, 7)
        assert MAP.most_sensitive(0.5) == (0, 1, 6, 7)
        assert MAP.most_sensitive(0.01) == (6, 7)

    def test_the_calm_part(self):
        assert MAP.calm_window(0.5) == (0.5, 1.0)

    @pytest.mark.parametrize(("share", "count"), [(0.6, 12), (0.4, 8), (0.01, 1), (1.0, 20)])
    def test_computed_steps_are_close_together_where_errors_grow(self, share, count):
        computed = MAP.computed_steps(share)
        assert len(set(computed)) == count
        assert computed[0] == 0
        if 1 < count < 20:
            early, late = sum(step < 10 for step in computed), sum(step >= 10 for step in computed)
            assert early > late
        level = replace(MAP, growth=((1.0,) * 4,) * 4)
        assert level.computed_steps(0.5) == tuple(range(0, 20, 2))

    def test_they_leave_what_is_sensitive(self):
        assert from_map(MAP)[1:4] == [
            "toma-stage:skip_blocks=(6,7);window=(0.2,1)@0.5",
            "toma-stage:skip_blocks=(6,7);window=(0.5,1)@0.5",
            "fast:computed=(0,1,2,3,4,5,6,8,9,11,14,17)",
        ]
        assert from_map(None) == []
        assert len(from_map(MAP)) == MADE_FROM_MAP

    def test_a_map_goes_through_json(self):
        assert SensitivityMap.from_dict(MAP.to_dict()) == MAP
