"""Fewer steps and caches: they save steps, begin fresh, and leave nothing behind."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from tiny import flux_transformer, sd15_unet
from tiny_clips import FRAMES, SIZE, clip_pipeline
from tiny_pipelines import denoiser, embeds, flux_pipeline, run, sd3_pipeline, sd15_pipeline, sdxl_pipeline
from toma_lab.columns import SHORTCUTS, Column, parse_shortcut, shortcut_from_dict
from toma_lab.columns.block_caches import FirstBlockCache
from toma_lab.columns.skipped import SkippedSteps
from toma_lab.costs import StepCosts
from toma_lab.pipelines.clips import ClipRequest, latents_of

from toma_diffusion import Merge, UsageError, speed_up

STEPS = 8
PACKAGES = {"deepcache": "DeepCache", "cache-dit": "cache_dit"}
OF_TRANSFORMERS = (
    "first-block-cache:threshold=0.4",
    "taylorseer:cache_interval=3",
    "taylorseer:cache_interval=3;use_lite_mode=True",
    "magcache:threshold=0.5",
)
OF_CACHE_DIT = (
    "cache-dit:F=1;B=0;R=0.8;max_warmup_steps=2;max_continuous_cached_steps=2",
    "cache-dit:F=1;B=1;R=0.8;max_warmup_steps=3;calibrator=taylorseer;taylorseer_order=1",
    "cache-dit:F=1;steps_mask=medium;steps_computation_policy=static",
    "cache-dit:F=1;R=0.8;max_warmup_steps=2;calibrator=foca",
    "cache-dit:F=1;R=0.8;max_warmup_steps=2;calibrator=dmd",
)
OF_WAN = ("seacache:threshold=0.5",)
OF_UNETS = ("deepcache:interval=3", "deepcache:interval=2;branch=1")
OF_ANY_MODEL = (
    "steps:14",
    "timesteps:computed=(0,1,2,4,7)",
    "solver:name=dpmpp-2m;steps=8;spacing=ays;computed=(0,1,2,4)",
)
ALL = (*OF_ANY_MODEL, *OF_TRANSFORMERS, *OF_CACHE_DIT, *OF_WAN, *OF_UNETS)
CASES = [
    *((flux_pipeline, text) for text in (*OF_TRANSFORMERS, *OF_CACHE_DIT)),
    *((sdxl_pipeline, text) for text in OF_UNETS),
    (sd15_pipeline, OF_UNETS[0]),  # it is too small for another branch
]


def generate(pipe):
    return run(pipe, num_inference_steps=STEPS)


def ready(pipe, text):
    """The shortcut, fitted to the pipeline."""
    for name, package in PACKAGES.items():
        if text.startswith(name):
            pytest.importorskip(package)
    return parse_shortcut(text).fitted(pipe, lambda: generate(pipe), STEPS)


def column(text):
    return Column("", shortcuts=(parse_shortcut(text),))


@pytest.mark.parametrize(("pipeline", "text"), CASES)
class TestCaches:
    def test_skips_steps_and_begins_fresh(self, pipeline, text):
        pipe = pipeline()
        whole, cache = generate(pipe), ready(pipe, text)
        with SkippedSteps.by([cache], pipe) as skipped, cache.applied(pipe, STEPS):
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
            with speed_up(pipe, merge=Merge(ratio=0.5, scope="module", num_regions=4, skip_blocks=())):
                both = generate(pipe)
        assert torch.isfinite(both).all()
        assert not torch.equal(both, cached)
        assert torch.equal(generate(pipe), whole)


def test_fewer_steps():
    shortcut = parse_shortcut("steps:14")
    assert (shortcut.title, shortcut.text, shortcut.slug) == ("14 steps", "steps:14", "steps-14")
    assert shortcut.steps_of(20) == 14
    with pytest.raises(UsageError, match="'steps:14' is not fewer than the 14 steps of the run"):
        shortcut.steps_of(14)


@pytest.mark.parametrize("text", ALL)
def test_text_and_dictionary_come_back(text):
    shortcut = parse_shortcut(text)
    assert shortcut.text == text
    assert shortcut_from_dict(shortcut.to_dict()) == shortcut
    assert hash(shortcut_from_dict(shortcut.to_dict())) == hash(shortcut)


def test_every_kind_is_tried_here():
    assert {text.partition(":")[0] for text in ALL} == set(SHORTCUTS)


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
        with pytest.raises(UsageError, match=r"needs the package DeepCache.*toma-diffusion-lab\[compare\]"):
            parse_shortcut("deepcache").check(sd15_unet())


class TestTwoDenoisers:
    """As in Wan 2.2: the second takes over in the middle of a generation."""

    @pytest.mark.parametrize(
        "text",
        [
            "first-block-cache:threshold=10",
            "taylorseer:cache_interval=3;use_lite_mode=True",
            "seacache:threshold=2",
            "cache-dit:F=1;R=1;max_warmup_steps=2",
        ],
    )
    def test_a_cache_skips_in_both(self, text):
        pipe = clip_pipeline("two")
        request = ClipRequest("a red apple", steps=20, width=SIZE[0], height=SIZE[1], frames=FRAMES)
        whole = latents_of(pipe, request)
        if text.startswith("cache-dit"):
            pytest.importorskip("cache_dit")
        cache = parse_shortcut(text).fitted(pipe, lambda: latents_of(pipe, request), 20)
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
            cache.check_on(pipe)


def test_taylorseer_is_refused_where_diffusers_would_do_nothing():
    model = clip_pipeline().transformer
    with pytest.raises(UsageError, match=r"would do nothing in a WanTransformer3DModel.*Add use_lite_mode=True"):
        parse_shortcut("taylorseer:cache_interval=3").check(model)
    parse_shortcut("taylorseer:cache_interval=3;use_lite_mode=True").check(model)
    parse_shortcut("taylorseer:cache_interval=3").check(flux_transformer())


class TestSeaCache:
    """Diffusers has it for Wan from text to video; elsewhere it would silently do nothing."""

    request = ClipRequest("a red apple", steps=12, width=SIZE[0], height=SIZE[1], frames=FRAMES)

    def skipped(self, pipe, text):
        with SkippedSteps(pipe.transformer) as counting, parse_shortcut(text).applied(pipe, 12):
            latents_of(pipe, self.request)
        return counting.share

    def test_skips_more_with_a_higher_threshold_and_leaves_nothing_behind(self):
        pipe = clip_pipeline()
        whole = latents_of(pipe, self.request)
        shares = [self.skipped(pipe, f"seacache:threshold={threshold}") for threshold in (0, 0.3, 3)]
        assert shares[0] == 0 < shares[1] < shares[2]
        assert torch.equal(latents_of(pipe, self.request), whole)

    def test_together_with_some_of_the_timesteps(self):
        pipe, few = clip_pipeline(), parse_shortcut("timesteps:computed=(0,1,2,4,5,7,9,11)")
        with few.applied(pipe, 8):
            assert 0 < self.skipped(pipe, "seacache:threshold=3") < 1

    @pytest.mark.parametrize("pipeline", [flux_pipeline, sd15_pipeline, lambda: clip_pipeline("image")])
    def test_is_refused_elsewhere(self, pipeline):
        pipe = pipeline()
        with pytest.raises(UsageError, match=r"would do nothing in a .*use first-block-cache|has its caches for some"):
            parse_shortcut("seacache:threshold=0.3").check_on(pipe)

    def test_is_refused_without_noise_levels_of_a_flow(self):
        pipe = clip_pipeline()
        pipe.scheduler = DDIMScheduler()
        with pytest.raises(UsageError, match="with a DDIMScheduler: it needs noise levels from 1 to 0"):
            parse_shortcut("seacache").check_on(pipe)


class TestCacheDiT:
    """The package changes the class of a pipeline, and keeps halves of guidance apart only if it is told."""

    text = "cache-dit:F=1;R=0.8;max_warmup_steps=2"

    @pytest.fixture(autouse=True)
    def package(self):
        pytest.importorskip("cache_dit")

    @pytest.mark.parametrize("pipeline", [flux_pipeline, sd3_pipeline, clip_pipeline])
    def test_gives_objects_and_classes_back_as_they_were(self, pipeline):
        pipe = pipeline()
        owners = [type(pipe), pipe, *denoiser(pipe).modules()]
        before = [dict(vars(owner)) for owner in owners]
        cache = replace(parse_shortcut(self.text), passes=1)
        with cache.applied(pipe, STEPS):
            assert [dict(vars(owner)) for owner in owners] != before
        assert [dict(vars(owner)) for owner in owners] == before

    def test_counts_the_halves_of_guidance(self):
        pipe = flux_pipeline()
        cache = parse_shortcut(self.text)
        assert cache.fitted(pipe, lambda: generate(pipe), STEPS).passes == 1
        guided = cache.fitted(pipe, lambda: run(pipe, num_inference_steps=STEPS, true_cfg_scale=3.0), STEPS)
        assert guided.passes == 2
        with SkippedSteps.by([guided], pipe) as skipped, guided.applied(pipe, STEPS):
            run(pipe, num_inference_steps=STEPS, true_cfg_scale=3.0)
        assert skipped.calls == 2 * STEPS
        assert skipped.computed % 2 == 0

    def test_finds_a_subclass_of_a_pipeline_it_knows(self):
        pipe = flux_pipeline()
        prompt = embeds(pipe) | {"output_type": "latent", "height": 128, "width": 128, "num_inference_steps": STEPS}
        pipe.__class__ = type("OurPipeline", (type(pipe),), {})
        cache = parse_shortcut(self.text).fitted(pipe, lambda: pipe(**prompt), STEPS)
        with SkippedSteps.by([cache], pipe) as skipped, cache.applied(pipe, STEPS):
            pipe(**prompt)
        assert skipped.share > 0
        assert "__call__" not in vars(type(pipe))

    def test_a_mask_says_which_steps_are_computed(self):
        pipe = flux_pipeline()
        cache = ready(pipe, "cache-dit:F=1;steps_mask=fast;steps_computation_policy=static")
        with SkippedSteps.by([cache], pipe) as skipped, cache.applied(pipe, STEPS):
            generate(pipe)
        assert (skipped.computed, skipped.calls) == (5, 8)

    def test_steps_cost_more_if_more_blocks_are_computed(self):
        costs = StepCosts.load("flux")
        gains = [costs.gain(20, column(f"cache-dit:F={first};max_warmup_steps=2"), cached=0.5) for first in (1, 8)]
        same = costs.gain(20, column("first-block-cache"), cached=0.5)
        assert gains[0] == same > gains[1] > 1

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("cache-dit:steps_mask=quick", "steps_mask='quick' is not known: use one of 'slow'"),
            ("cache-dit:calibrator=taylor", "calibrator='taylor' is not known: .*Did you mean 'taylorseer'"),
            ("cache-dit:taylorseer_order=1", "taylorseer_order=1 needs calibrator=taylorseer: add it"),
            ("cache-dit:steps_computation_policy=static", "='static' needs steps_mask=medium: add it"),
            ("cache-dit:Fn=1", "'Fn' is not a setting of cache-dit"),
        ],
    )
    def test_mistakes_of_settings(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_shortcut(text)

    def test_nothing_to_skip(self):
        with pytest.raises(UsageError, match="skips none of 8 steps: the first 8 are always computed"):
            parse_shortcut("cache-dit:F=1").steps_of(8)
        with pytest.raises(UsageError, match="is not possible with 5 steps: the package has masks for 4, 6, and 8"):
            parse_shortcut("cache-dit:F=1;steps_mask=slow").steps_of(5)
        with pytest.raises(UsageError, match=r"would do nothing: it computes 8 blocks in every step.*such as F=1;B=0"):
            parse_shortcut("cache-dit").check_on(flux_pipeline())

    def test_a_unet_is_refused(self):
        with pytest.raises(UsageError, match=r"with a UNet2DConditionModel: Cache-DiT knows no UNet.*use deepcache"):
            parse_shortcut(self.text).check_on(sd15_pipeline())

    def test_an_unknown_pipeline_is_refused(self):
        pipe = flux_pipeline()
        pipe.__class__ = type("OurPipeline", (DiffusionPipeline,), {})
        with pytest.raises(UsageError, match="with a OurPipeline: Cache-DiT does not know it"):
            parse_shortcut(self.text).check_on(pipe)

    def test_a_missing_package_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cache_dit", None)
        with pytest.raises(UsageError, match=r"needs the package cache-dit.*toma-diffusion-lab\[compare\]"):
            parse_shortcut(self.text).check(flux_transformer())
