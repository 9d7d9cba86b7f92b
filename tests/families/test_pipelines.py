"""Real pipelines of all families: steps come from their scheduler, removal is exact, nothing waits for the GPU."""

import diffusers
import pytest
import torch
from diffusers import (
    FluxImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from merging import merged, steady
from observe import attention_lengths, our_hooks, same_picture, state_of
from pairs import in_turn, named
from tiny import SCOPES, TOKENS
from tiny_pipelines import (
    PIPELINES,
    TODAY_PIPELINES,
    VIDEO_PIPELINES,
    flux_pipeline,
    generate,
    h3_pipeline,
    hunyuan15_pipeline,
    img2img,
    inpainting_pipeline,
    picture,
    pipeline,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
    wan_pipeline,
)
from tracing import SELECTS, Trace, traced

LATE = {"window": (0.5, 1.0)}


class TestLaterImagePipelines:
    @pytest.mark.parametrize("tiny", TODAY_PIPELINES, ids=named)
    def test_steps_a_window_and_removal(self, tiny):
        """In two generations. Of two passes over a step, the second uses the plans of the first."""
        pipe, guided = tiny.build(), bool(tiny.guided)
        plain = tiny.run(pipe, 4, guided)
        handle = merged(pipe, share_plan=True, select_every=3)
        for _ in range(2):
            with Trace(pipe) as trace:
                tiny.run(pipe, 4, guided)
            assert len(trace.calls) == len(tiny.calls(list(range(4)), guided))
            assert trace.where(SELECTS) == [tiny.calls([step], guided)[0] for step in (0, 3)]
            assert trace.where("merge") == tiny.calls(list(range(4)), guided)
            assert state_of(pipe.transformer).session._last.is_exact
        handle.remove()
        handle = steady(pipe, **LATE)
        with Trace(pipe) as trace:
            ours = tiny.run(pipe, 4, guided)
        assert trace.where("merge") == tiny.calls([2, 3], guided)
        assert ours.isfinite().all()
        assert not torch.allclose(ours, plain, atol=1e-3)
        handle.remove()
        assert torch.equal(tiny.run(pipe, 4, guided), plain)

    @pytest.mark.parametrize("tiny", TODAY_PIPELINES, ids=named)
    def test_no_value_is_read_after_the_first_step(self, tiny):
        """Reading one would wait for the GPU."""
        pipe, guided, traces = tiny.build(), bool(tiny.guided), []
        for merges in (False, True):
            if merges:
                steady(pipe, select_every=2, reweigh_every=1)
            with Trace(pipe) as trace:
                tiny.run(pipe, 3, guided)
            traces.append(trace)
        assert traces[1].where("merge")
        assert traces[1].reads[1:] == traces[0].reads[1:]


@pytest.mark.parametrize("name", VIDEO_PIPELINES)
class TestVideoPipelines:
    def test_a_window_of_the_steps_is_merged(self, name):
        pipe = pipeline(name)
        whole = generate(pipe)
        handle = merged(pipe, **LATE)
        with Trace(pipe.transformer) as trace:
            lengths = attention_lengths(lambda: generate(pipe))
        seen = list(dict.fromkeys((step, merges) for (step, _), merges in zip(trace.steps, trace.merged, strict=True)))
        assert seen == [(0, False), (1, False), (2, True), (3, True)]
        assert {queries >= TOKENS for queries, _ in lengths} == {True, False}
        kinds = {(kind.grid, kind.tokens_before, kind.tokens_after) for kind in handle.summary().merge.kinds}
        assert kinds == {("4×4×4", 64, 32)}
        assert not torch.allclose(generate(pipe), whole, atol=1e-3)
        handle.enabled = False
        assert torch.equal(generate(pipe), whole)
        handle.remove()
        assert torch.equal(generate(pipe), whole)


def test_a_modular_pipeline():
    """MiniMax-H3 has no other, and its timesteps are no views of the scheduler's."""
    pipe, run_it = h3_pipeline()
    whole = run_it()
    handle = merged(pipe, **LATE)
    with Trace(pipe.transformer) as trace:
        ours = run_it()
    assert trace.merged == [False, False, True, True]
    assert [(kind.grid, kind.tokens_after) for kind in handle.summary().merge.kinds] == [("4×4×4", 32)]
    assert torch.equal(ours[:16], whole[:16])  # the keyframe
    assert not torch.allclose(ours, whole, atol=1e-3)
    handle.remove()
    assert torch.equal(run_it(), whole)


class TestTwoDenoisers:
    """Wan 2.2: the second denoiser takes over in the middle."""

    def test_both_are_merged_and_steps_are_counted_over_both(self):
        pipe = wan_pipeline(experts=2)
        whole = generate(pipe, steps=6)
        handle = merged(pipe, window=(0.1, 0.8))
        assert handle.models == (pipe.transformer, pipe.transformer_2)
        with Trace(*handle.models) as trace:
            generate(pipe, steps=6)
        assert trace.model_of == sorted(trace.model_of)
        assert set(trace.model_of) == {0, 1}
        seen = dict.fromkeys((step, merges) for (step, _), merges in zip(trace.steps, trace.merged, strict=True))
        assert list(seen) == list(enumerate([False, True, True, True, True, False]))
        summary = handle.summary()
        for each in (summary, *summary.others):
            assert [(kind.grid, kind.tokens_after) for kind in each.merge.kinds] == [("4×4×4", 32)]
        assert "Denoiser 2 of 2" in str(summary)
        handle.remove()
        assert our_hooks(pipe.transformer) == our_hooks(pipe.transformer_2) == []
        assert torch.equal(generate(pipe, steps=6), whole)

    def test_a_time_for_every_token(self):
        """TI2V: steps are read from the scheduler, and the first frame stays whole."""
        pipe = wan_pipeline(expand_timesteps=True)
        handle = merged(pipe, **LATE)
        with Trace(pipe.transformer) as trace:
            generate(pipe)
        assert list(dict.fromkeys(zip([step for step, _ in trace.steps], trace.merged, strict=True))) == [
            (0, False),
            (1, False),
            (2, True),
            (3, True),
        ]
        assert handle.summary().merge.kinds[0].grid == "3×4×4"


@pytest.mark.skipif(not hasattr(diffusers, "HunyuanVideo15Pipeline"), reason="this diffusers has no HunyuanVideo 1.5")
class TestHunyuanVideo15:
    """Complete pipelines: prompts and images are encoded, latents are decoded, guidance is that of a guider."""

    def test_a_guider_that_stops_early(self):
        """Two passes over a step share a plan, which the first selects. In bfloat16 times are no views of the
        scheduler's."""
        pipe = hunyuan15_pipeline(stop=0.5)
        pipe.transformer.to(torch.bfloat16)
        merged(pipe)
        with Trace(pipe.transformer) as trace:
            generate(pipe)
        assert trace.steps == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]
        assert trace.where(SELECTS) == [0, 2, 4, 5]


OFTEN = {"select_every": 3, "reweigh_every": 2}
BY_EIGHT = [(168, 96), (104, 104), (104, 192), (128, 128)]
"""Latents of 21×12, 13×13 and 13×24: those of 1344×768, 1000×1000 and 520×968 in small."""
BY_SIXTEEN = [(336, 192), (208, 208), (144, 272), (128, 128)]
"""The same for models whose tokens are 16 pixels wide."""


class TestChanges:
    """Merging applied once and for all gives what merging applied anew gives."""

    @pytest.mark.parametrize(("name", "scope"), in_turn(PIPELINES, ["module", "stage"]))
    def test_sizes_batches_and_steps(self, name, scope):
        # SD3's pipeline repeats pooled embeddings that it made itself, not those it is given.
        images = {"prompts": 2} if name == "sd3" else {"num_images_per_prompt": 2}
        batches = [{"prompts": 1}, {"prompts": 3}, images, {"prompts": 4}]
        sizes = BY_EIGHT if name in ("sd15", "sdxl") else BY_SIXTEEN
        cases = [
            {"height": height, "width": width, "num_inference_steps": steps, **batch}
            for (height, width), batch, steps in zip(sizes, batches, (3, 5, 2, 4), strict=True)
        ]
        self.check(PIPELINES[name](), [*cases, cases[0]], scope=scope)

    def test_guidance(self):
        cases = [{"guidance_scale": scale, "num_inference_steps": 4} for scale in (7.5, 0.0, 7.5)]
        self.check(sd15_pipeline(), cases)
        cases = [{"true_cfg_scale": scale, "num_inference_steps": 4} for scale in (2.0, 1.0, 2.0)]
        self.check(flux_pipeline(), cases)

    def check(self, pipe, cases, schedulers=None, **settings):
        schedulers = schedulers or [pipe.scheduler] * len(cases)
        together = []
        with steady(pipe, **OFTEN | settings):
            for case, pipe.scheduler in zip(cases, schedulers, strict=True):
                together.append(run(pipe, **case))
        for result, case, pipe.scheduler in zip(together, cases, schedulers, strict=True):
            with steady(pipe, **OFTEN | settings):
                same_picture(run(pipe, **case), result)
        assert not torch.equal(run(pipe, **cases[-1]), together[-1])

    def test_samples_of_a_batch_do_not_touch_each_other(self):
        pipe = sd15_pipeline()
        steady(pipe, **OFTEN)
        latents, text = torch.randn(3, 4, 16, 16), torch.randn(3, 6, 32)
        arguments = {"prompts": 3, "num_inference_steps": 4}
        before = run(pipe, latents=latents, prompt_embeds=text, **arguments)
        latents, text = latents.clone(), text.clone()
        latents[1], text[1] = torch.randn(4, 16, 16), torch.randn(6, 32)
        after = run(pipe, latents=latents, prompt_embeds=text, **arguments)
        same_picture(after[[0, 2]], before[[0, 2]])
        assert not torch.equal(after[1], before[1])


class TestOtherPipelines:
    """Image to image, inpainting, perturbed attention."""

    @pytest.mark.parametrize(
        ("make", "scope"),
        in_turn(
            [
                lambda: img2img(sd15_pipeline(), StableDiffusionImg2ImgPipeline),
                lambda: img2img(sdxl_pipeline(), StableDiffusionXLImg2ImgPipeline),
                lambda: img2img(flux_pipeline(), FluxImg2ImgPipeline),
                lambda: img2img(sd3_pipeline(), StableDiffusion3Img2ImgPipeline),
            ],
            SCOPES,
        ),
    )
    def test_image_to_image(self, make, scope):
        self.check(make(), scope, image=picture(), strength=0.5)

    @pytest.mark.parametrize(("scope", "strength"), in_turn(SCOPES, [0.5, 1.0]))
    def test_inpainting(self, scope, strength):
        mask = torch.zeros(1, 1, 128, 128)
        mask[..., 32:96] = 1
        self.check(inpainting_pipeline(), scope, image=picture(), mask_image=mask, strength=strength)

    @pytest.mark.parametrize("scope", SCOPES)
    def test_perturbed_attention_guidance(self, scope):
        """PAG triples the batch and puts in attention processors of its own while it runs."""
        parts = sd15_pipeline().components
        pipe = quiet(StableDiffusionPAGPipeline(**parts, requires_safety_checker=False, pag_applied_layers=["mid"]))
        arguments = {"pag_scale": 3.0, "guidance_scale": 5.0}
        self.check(pipe, scope, **arguments)
        steady(pipe, scope=scope)
        assert {query for query, _ in attention_lengths(lambda: run(pipe, **arguments))} == {128, 32}

    def check(self, pipe, scope, **arguments):
        plain = run(pipe, num_inference_steps=4, **arguments)
        handle = steady(pipe, **OFTEN, scope=scope)
        ours = run(pipe, num_inference_steps=4, **arguments)
        assert ours.shape == plain.shape
        assert ours.isfinite().all()
        assert not torch.equal(ours, plain)
        same_picture(run(pipe, num_inference_steps=4, **arguments), ours)
        handle.remove()
        assert torch.equal(run(pipe, num_inference_steps=4, **arguments), plain)


class TestNoWaiting:
    """Nothing in the loop reads a value back from the device."""

    @pytest.mark.parametrize(
        ("name", "guidance"), [*((name, {}) for name in PIPELINES), ("flux", {"true_cfg_scale": 2.0})]
    )
    def test_no_value_is_read_after_the_first_step(self, name, guidance):
        pipe = PIPELINES[name]()
        arguments = {"num_inference_steps": 7, **guidance}
        plain = traced(pipe, **arguments)
        merged(pipe, **OFTEN, window=(0.2, 1.0))
        ours = traced(pipe, **arguments)
        assert ours.total("merge")
        assert ours.reads[1:] == plain.reads[1:]
