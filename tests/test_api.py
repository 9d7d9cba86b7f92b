"""The front door: what the two calls do, and what they say where they cannot."""

import copy
import pickle

import pytest
import torch
from tiny import one
from tiny import sd15_unet as unet

from toma_diffusion import Handle, Merge, Skip, UsageError, apply_toma, speed_up
from toma_diffusion.others import METHODS

SAMPLE, TEXT = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32)


def call(model, timestep=10, seed=0):
    sample = SAMPLE + seed
    return model(sample, timestep, TEXT).sample


def generate(model, handle, steps):
    """A generation in a loop of one's own. Returns the outputs of all steps."""
    handle.begin(steps)
    outputs = []
    for step in range(steps):
        handle.step(step)
        outputs.append(call(model, 1000 - step, seed=step))
    return torch.stack(outputs)


class TestSpeedUp:
    def test_without_anything_it_is_balanced(self):
        model = unet()
        handle = speed_up(model)
        assert str(handle.summary()) == "12 of 20 steps are computed, 8 skipped and predicted\n" + (
            "no tokens are merged in generations of so many steps"
        )
        generate(model, handle, 20)
        first, *_ = str(handle.summary()).splitlines()
        assert first.startswith("12 of 20 steps were computed (0, 1,")
        assert first.endswith("8 skipped and predicted")

    def test_only_what_is_given_is_done(self):
        merging = speed_up(unet(), merge=Merge(ratio=0.5)).summary()
        assert merging.skip is None
        assert merging.merge.headline == "half of the tokens are merged in 3 of 4 blocks"
        skipping = speed_up(unet(), skip=Skip(computed=8)).summary()
        assert skipping.merge is None
        assert skipping.skip.lines == ("8 of 20 steps are computed, 12 skipped and predicted",)

    def test_settings_take_the_place_of_the_presets(self):
        summary = speed_up(unet(), "fast", merge=Merge(ratio=0.25)).summary()
        assert summary.skip.lines[0].startswith("8 of 20")
        assert summary.merge.headline.startswith("a quarter of the tokens")

    def test_another_method(self):
        model = unet()
        handle = speed_up(model, merge=METHODS["tomesd"](ratio=0.5))
        call(model)
        assert handle.summary().merge.config.label == "ToMeSD"

    def test_a_preset_does_different_things_with_few_steps(self):
        model = unet(sample_size=32)
        handle = speed_up(model, "balanced")
        handle.begin(4)
        sample = torch.randn(2, 4, 32, 32)
        for step in range(4):
            handle.step(step)
            model(sample, 1000 - step, TEXT)
        assert "half of 1024 tokens merged" in str(handle.summary())
        assert handle.summary().skip.num_predicted == 0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (("fastr",), "preset='fastr' is not known"),
            (("toma-stage",), r"is a variant of merging: call apply_toma\(pipe, 'toma-stage'\)"),
            ((Merge(),), "is not a name: pass settings as merge"),
        ],
    )
    def test_wrong_presets(self, settings, message):
        with pytest.raises(UsageError, match=message):
            speed_up(unet(), *settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"merge": 0.5}, r"merge=0\.5 is not allowed: pass merge=Merge\(…\)"),
            ({"skip": 10}, r"skip=10 is not allowed: pass skip=Skip\(…\)"),
            ({"merge": Merge(), "learned": "learned.json"}, "learned says how steps are skipped, and none is"),
            ({"merge": Merge(skip_blocks=(9,))}, r"skip_blocks=\(9,\) names block 9.*has 4 transformer blocks"),
            ({"merge": Merge(skip_blocks=(0, 1, 2, 3))}, "nothing would be merged.*4 transformer blocks"),
        ],
    )
    def test_wrong_settings(self, settings, message):
        with pytest.raises(UsageError, match=message):
            speed_up(unet(), **settings)

    def test_something_else(self):
        with pytest.raises(UsageError, match="str is neither a model nor a pipeline with a unet or a transformer"):
            speed_up("a pipeline")

    def test_twice(self):
        model = unet()
        handle = speed_up(model)
        with pytest.raises(RuntimeError, match=r"was sped up already: call Handle.of\(pipe\)\.remove\(\) first"):
            speed_up(model)
        handle.remove()
        speed_up(model)

    def test_without_a_number_of_steps_a_preset_says_what_to_do(self):
        model = unet()
        speed_up(model, "fast")
        with pytest.raises(RuntimeError, match=r"handle\.begin\(num_steps\)"):
            call(model)


class TestApplyToma:
    @pytest.mark.parametrize("steps", [1, 4, 20])
    def test_it_always_merges(self, steps):
        model = unet()
        handle = apply_toma(model, ratio=0.75)
        generate(model, handle, steps)
        assert handle.summary().merge.headline == "three quarters of 256 and 64 tokens merged in 3 of 4 blocks"
        assert handle.summary().skip is None

    def test_variants(self):
        assert apply_toma(unet(), "toma-tile", ratio=0.25).summary().merge.config.num_regions == 256
        for wrong, message in (
            ("fast", r"'fast' is a preset, which merges nothing by itself: call speed_up\(pipe, 'fast'\)"),
            ("tomesd", r"'tomesd' is another method than ToMA: call speed_up\(pipe, merge=ToMeSD"),
            ("toma-tiles", "variant='toma-tiles' is not known"),
        ):
            with pytest.raises(UsageError, match=message):
                apply_toma(unet(), wrong)


class TestNothingIsSilent:
    def test_a_generation_that_is_not_made_faster(self):
        model = unet()
        handle = speed_up(model, "fast")
        expected = "a generation of 3 steps was not made faster at all.*with the preset 'fast'"
        with pytest.warns(UserWarning, match=expected):
            generate(model, handle, 3)

    def test_as_many_computed_steps_as_there_are(self):
        model = unet()
        handle = speed_up(model, skip=Skip(computed=8))
        with pytest.warns(UserWarning, match="8 steps was not made faster at all.*computed=8"):
            generate(model, handle, 8)

    def test_grids_that_are_too_small(self):
        model = unet()
        speed_up(model, merge=Merge(min_tokens=512))
        with pytest.warns(UserWarning, match="no token is removed on these grids.*fewer than min_tokens=512"):
            call(model)

    def test_merging_that_no_computed_step_allows(self):
        model = unet()
        handle = speed_up(model, merge=Merge(window=(0.5, 1.0)), skip=Skip(computed=(0, 1, 2)))
        with pytest.warns(UserWarning, match=r"tokens are never merged: none of the computed steps \(0, 1, 2\)"):
            generate(model, handle, 10)
        assert "no tokens are merged" in str(handle.summary())

    def test_frames_of_a_picture(self):
        model = unet()
        speed_up(model, merge=Merge(region_frames=2))
        with pytest.raises(UsageError, match="region_frames=2 counts only for clips"):
            call(model)


CHANGES = {
    "ratio": ({}, 0.25),
    "scope": ({}, "block"),
    "window": ({}, (0.5, 1.0)),
    "skip_blocks": ({}, (0,)),
    "sites": ({"scope": "module"}, ("attn",)),
    "min_tokens": ({}, 100),
    "region": ({}, "stripe"),
    "region_tokens": ({}, 64),
    "selection_tokens": ({}, 16),
    "num_regions": ({}, 16),
    "region_frames": ({}, 1),
    "distance_weight": ({}, 0.0),
    "assign": ({"region_tokens": 64}, "global"),
    "scale": ({}, 1.0),
    "select_every": ({}, 3),
    "reweigh_every": ({"select_every": 3}, 1),
    "share_plan": ({}, True),
    "guidance_parts": ({}, 2),
}
"""A value for every field of `Merge` that changes what is computed, beside others that it needs."""


class TestEveryFieldHasAnEffect:
    @pytest.mark.parametrize("field", CHANGES)
    def test_of_merge(self, field):
        needed, value = CHANGES[field]

        def run(**settings):
            if field == "region_frames":
                wan = one("wan")
                model = wan.build()
                speed_up(model, merge=Merge(skip_blocks=(), **settings))
                return wan.call(model, frames=4)
            model = unet()
            return generate(model, speed_up(model, merge=Merge(**settings)), 4)

        assert not torch.equal(run(**needed), run(**needed | {field: value}))

    def test_of_the_backend(self, recwarn):
        """Where it cannot run, it says so."""
        model = unet()
        handle = speed_up(model, merge=Merge(backend="triton"))
        call(model)
        summary = handle.summary().merge
        assert "triton" in summary.backend or summary.fallbacks or recwarn.list

    def test_none_is_left_out(self):
        assert {*CHANGES, "backend"} == set(Merge.names())

    def test_of_skip(self):
        def run(skip):
            model = unet()
            return generate(model, speed_up(model, skip=skip), 8)

        assert not torch.equal(run(Skip(computed=3)), run(Skip(computed=(0, 3))))


class TestHandle:
    def test_of_a_pipeline_that_was_sped_up(self):
        model = unet()
        handle = speed_up(model)
        assert Handle.of(model).models == handle.models
        Handle.of(model).remove()
        with pytest.raises(UsageError, match="was not sped up"):
            Handle.of(model)
        with pytest.raises(RuntimeError, match="was removed from its model"):
            handle.summary()

    @pytest.mark.parametrize("settings", [{"merge": Merge()}, {"skip": Skip(computed=(0, 2))}])
    def test_off_and_removed_the_model_is_what_it_was(self, settings):
        model = unet()
        expected = call(model)
        with speed_up(model, **settings) as handle:
            handle.enabled = False
            assert torch.equal(call(model), expected)
            assert "switched off" in str(handle.summary())
        assert torch.equal(call(model), expected)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    @pytest.mark.parametrize("settings", [{"preset": "fast"}, {"preset": "balanced"}])
    def test_copies_do_what_the_original_does(self, copied, settings):
        model = unet()
        handle = speed_up(model, **settings)
        other = copied(model)
        assert torch.equal(generate(model, handle, 8), generate(other, Handle.of(other), 8))

    def test_it_counts_only_the_blocks_that_are_merged(self):
        model = unet(sample_size=32)
        handle = speed_up(model, merge=Merge(min_tokens=512))
        model(torch.randn(2, 4, 32, 32), 10, TEXT)
        assert handle.summary().merge.headline == "half of 1024 tokens merged in 2 of 4 blocks"

    def test_a_wrong_mode_of_compilation_changes_nothing(self):
        handle = speed_up(unet())
        with pytest.raises(UsageError, match="mode='nonsense' is not known"):
            handle.compile("nonsense")
        with pytest.raises(UsageError, match=r"pipe=\[\] is empty"):
            Handle.of([])

    def test_steps_that_were_computed_are_those_that_ran(self):
        model = unet()
        handle = speed_up(model, skip=Skip(computed=(0, 1, 3)))
        handle.begin(5)
        for step in range(3):
            handle.step(step)
            call(model, seed=step)
        assert handle.summary().skip.lines[0] == "2 of 3 steps were computed (0, 1), 1 skipped and predicted"
