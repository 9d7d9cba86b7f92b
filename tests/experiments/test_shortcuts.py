"""Fewer steps and caches: they save steps, begin fresh, and leave nothing behind."""

import copy
import sys

import pytest
import torch
from tiny import flux_transformer, sd15_unet
from tiny_clips import FRAMES, SIZE, clip_pipeline
from tiny_pipelines import denoiser, flux_pipeline, run, sd15_pipeline, sdxl_pipeline

from toma_diffusion import UsageError, apply_toma
from toma_diffusion.experiments.shortcuts import SHORTCUTS, parse_shortcut, shortcut_from_dict
from toma_diffusion.experiments.shortcuts.block_caches import FirstBlockCache
from toma_diffusion.experiments.shortcuts.skipped import SkippedSteps
from toma_diffusion.pipelines.clips import ClipRequest, latents_of

STEPS = 8
OF_TRANSFORMERS = (
    "first-block-cache:threshold=0.4",
    "taylorseer:cache_interval=3;max_order=1",
    "taylorseer:cache_interval=3;use_lite_mode=True",
    "magcache:threshold=0.5;retention_ratio=0.2",
)
OF_UNETS = ("deepcache:interval=3", "deepcache:interval=2;branch=1")
OF_ANY_MODEL = (
    "steps:14",
    "timesteps:computed=(0,1,2,4,7)",
    "solver:name=dpmpp-2m;steps=8;spacing=karras;computed=(0,1,2,4)",
)
CASES = [
    *((flux_pipeline, text) for text in OF_TRANSFORMERS),
    *((sdxl_pipeline, text) for text in OF_UNETS),
    (sd15_pipeline, OF_UNETS[0]),  # it is too small for another branch
]


def generate(pipe):
    return run(pipe, num_inference_steps=STEPS)


def ready(pipe, text):
    """The shortcut, fitted to the pipeline."""
    if text.startswith("deepcache"):
        pytest.importorskip("DeepCache")
    return parse_shortcut(text).fitted(pipe, lambda: generate(pipe), STEPS)


@pytest.mark.parametrize(("pipeline", "text"), CASES)
class TestCaches:
    def test_skips_steps_and_begins_fresh(self, pipeline, text):
        pipe = pipeline()
        whole, cache = generate(pipe), ready(pipe, text)
        with SkippedSteps(denoiser(pipe)) as skipped, cache.applied(pipe, STEPS):
            first = generate(pipe)
        assert 0 < skipped.share < 1
        assert not torch.equal(first, whole)
        with cache.applied(pipe, STEPS):
            run(pipe, seed=1, num_inference_steps=STEPS)
        with cache.applied(pipe, STEPS):
            assert torch.equal(generate(pipe), first)

    def test_leaves_nothing_behind(self, pipeline, text):
        pipe = pipeline()
        whole, cache = generate(pipe), ready(pipe, text)
        with cache.applied(pipe, STEPS):
            generate(pipe)
        with pytest.raises(TypeError), cache.applied(pipe, STEPS):
            run(pipe, num_inference_steps="many")
        assert torch.equal(generate(pipe), whole)
        assert not [module for module in denoiser(pipe).modules() if "forward" in vars(module)]
        assert torch.equal(generate(copy.deepcopy(pipe)), whole)

    def test_together_with_merging(self, pipeline, text):
        pipe = pipeline()
        whole, cache = generate(pipe), ready(pipe, text)
        with cache.applied(pipe, STEPS):
            cached = generate(pipe)
            with apply_toma(pipe, "toma-tile", ratio=0.5, num_regions=4, skip_blocks=()):
                both = generate(pipe)
        assert torch.isfinite(both).all()
        assert not torch.equal(both, cached)
        assert torch.equal(generate(pipe), whole)


def test_nothing_is_skipped_without_a_cache():
    pipe = flux_pipeline()
    with SkippedSteps(pipe.transformer) as skipped:
        generate(pipe)
    assert skipped.calls == STEPS
    assert skipped.share == 0
    assert not pipe.transformer._forward_pre_hooks


def test_fewer_steps():
    shortcut = parse_shortcut("steps:14")
    assert (shortcut.title, shortcut.text, shortcut.slug) == ("14 steps", "steps:14", "steps-14")
    assert shortcut.steps_of(20) == 14
    with pytest.raises(UsageError, match="'steps:14' is not fewer than the 14 steps of the run"):
        shortcut.steps_of(14)


@pytest.mark.parametrize("text", [*OF_ANY_MODEL, *OF_TRANSFORMERS, *OF_UNETS])
def test_text_and_dictionary_come_back(text):
    shortcut = parse_shortcut(text)
    assert shortcut.text == text
    assert shortcut_from_dict(shortcut.to_dict()) == shortcut
    assert hash(shortcut_from_dict(shortcut.to_dict())) == hash(shortcut)


def test_every_kind_is_tried_here():
    assert {text.partition(":")[0] for text in (*OF_ANY_MODEL, *OF_TRANSFORMERS, *OF_UNETS)} == set(SHORTCUTS)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("steps", "method 'steps' does not say how many: write steps:14"),
            ("steps:few", "steps='few' is not allowed: it must be a whole number of 1 or more"),
            ("first-block-cache:treshold=1", "'treshold' is not a setting of first-block-cache: .*mean 'threshold'"),
            ("first-block-cache:threshold=low", "threshold='low' is not allowed: it must be 0 or more"),
            ("taylorseer:cache_interval=0", "cache_interval=0 is not allowed: it must be a whole number of 1 or more"),
            ("taylorseer:use_lite_mode=1", "use_lite_mode=1 is not allowed: it must be True or False"),
            ("magcache:-1", "threshold=-1 is not allowed: it must be 0 or more"),
            ("magcache:threshold=1;fast", "'fast' is not a setting; write name=value"),
            ("deepcache:interval=0", "interval=0 is not allowed"),
        ],
    )
    def test_of_settings_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_shortcut(text)

    @pytest.mark.parametrize("text", OF_TRANSFORMERS)
    def test_a_unet_has_no_cache_of_diffusers(self, text):
        with pytest.raises(UsageError, match=r"cannot be used with a UNet2DConditionModel: .*use deepcache"):
            parse_shortcut(text).check(sd15_unet())

    def test_a_transformer_has_no_deepcache(self):
        with pytest.raises(UsageError, match="'deepcache:interval=3' cannot be used with a FluxTransformer2DModel"):
            parse_shortcut("deepcache").check(flux_transformer())

    def test_an_older_diffusers_is_named(self, monkeypatch):
        monkeypatch.setattr(FirstBlockCache, "config_class", "NotYetConfig")
        with pytest.raises(UsageError, match=r"'first-block-cache' needs a newer diffusers: .* has no NotYetConfig"):
            parse_shortcut("first-block-cache").check(flux_transformer())

    def test_a_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "DeepCache", None)
        with pytest.raises(UsageError, match=r"needs the package DeepCache. Install it: .*toma-diffusion\[compare\]"):
            parse_shortcut("deepcache").check(sd15_unet())


class TestTwoDenoisers:
    """As in Wan 2.2: the second takes over in the middle of a generation."""

    @pytest.mark.parametrize(
        "text", ["first-block-cache:threshold=10", "taylorseer:cache_interval=3;use_lite_mode=True"]
    )
    def test_a_cache_skips_in_both(self, text):
        pipe, cache = clip_pipeline("two"), parse_shortcut(text)
        request = ClipRequest("a red apple", steps=20, width=SIZE[0], height=SIZE[1], frames=FRAMES)
        whole = latents_of(pipe, request)
        with (
            SkippedSteps(pipe.transformer) as first,
            SkippedSteps(pipe.transformer_2) as second,
            cache.applied(pipe, request.steps),
        ):
            latents_of(pipe, request)
        assert 0 < first.share < 1
        assert 0 < second.share < 1
        assert torch.equal(latents_of(pipe, request), whole)

    def test_one_that_counts_all_steps_is_refused(self):
        pipe, cache = clip_pipeline("two"), parse_shortcut("magcache:threshold=0.1")
        with pytest.raises(UsageError, match="cannot be used with 2 denoisers that take turns"):
            cache.fitted(pipe, lambda: None, STEPS)


def test_taylorseer_is_refused_where_diffusers_would_do_nothing():
    model = clip_pipeline().transformer
    with pytest.raises(UsageError, match=r"would do nothing in a WanTransformer3DModel.*Add use_lite_mode=True"):
        parse_shortcut("taylorseer:cache_interval=3").check(model)
    parse_shortcut("taylorseer:cache_interval=3;use_lite_mode=True").check(model)
    parse_shortcut("taylorseer:cache_interval=3").check(flux_transformer())
