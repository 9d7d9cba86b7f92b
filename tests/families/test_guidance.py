"""The parts of guidance choose together: in a batch, or in several passes over one sample."""

import math

import pytest
import torch
from diffusers import (
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPanoramaPipeline,
)
from diffusers.callbacks import SDCFGCutoffCallback
from observe import CountOperators, same_picture, state_of
from tiny import FAMILIES, SETTINGS, flux_transformer, sd3_transformer, sd15_unet
from tiny_pipelines import PIPELINES, denoiser, embeds, flux_pipeline, quiet, run, sd15_pipeline

from toma_diffusion import UsageError, apply_toma

EVERY_STEP = SETTINGS | {"select_every": 1, "reweigh_every": 1}
BATCHED = ("sd15", "sdxl", "sd3", "pixart")


class Plans:
    """For every call of a model: how many parts its batch was, and the destinations of every kind of block."""

    def __init__(self, model):
        self.model = model
        self.parts: list[int] = []
        self.positions: list[dict[str, torch.Tensor]] = []

    def __enter__(self):
        self.hook = self.model.register_forward_hook(lambda *_: self._look())
        return self

    def __exit__(self, *error):
        self.hook.remove()

    def _look(self):
        plans = state_of(self.model).current
        self.parts.append(next(iter(plans.values())).parts)
        self.positions.append({name: plan.positions.clone() for name, plan in plans.items()})


def plans_of(pipe, **arguments) -> Plans:
    with Plans(denoiser(pipe)) as plans:
        run(pipe, **arguments)
    return plans


@pytest.mark.parametrize("name", BATCHED)
def test_both_halves_of_a_batch_choose_together(name):
    pipe = PIPELINES[name]()
    handle = apply_toma(pipe.unet if hasattr(pipe, "unet") else pipe.transformer, **EVERY_STEP)
    plans = plans_of(pipe, guidance_scale=4.0)
    assert set(plans.parts) == {2}
    for positions in plans.positions:
        assert all(torch.equal(*each.chunk(2)) for each in positions.values())
    assert "2 parts of guidance choose together" in str(handle.summary())


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_pictures_equals_single_pictures(name):
    """Also of their prompts: each picture's two halves share a plan, not each prompt's."""
    pipe = PIPELINES[name]()
    apply_toma(denoiser(pipe), **EVERY_STEP)
    prompts = embeds(pipe, 3)
    noise = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    together = run(pipe, prompts=3, latents=noise, guidance_scale=4.0)
    for index in range(3):
        one = {
            key: value[index : index + 1] if isinstance(value, torch.Tensor) else value
            for key, value in prompts.items()
        }
        alone = run(pipe, latents=noise[index : index + 1], guidance_scale=4.0, **one)
        same_picture(together[index : index + 1], alone)


@pytest.mark.parametrize("name", BATCHED)
def test_no_guidance_no_parts(name):
    pipe = PIPELINES[name]()
    apply_toma(denoiser(pipe), **EVERY_STEP)
    assert set(plans_of(pipe, prompts=2, guidance_scale=1.0).parts) == {1}


def test_three_parts_with_perturbed_attention():
    pipe = sd15_pipeline()
    parts = {name: part for name, part in pipe.components.items() if name != "image_encoder"}
    pipe = quiet(StableDiffusionPAGPipeline(**parts, requires_safety_checker=False, pag_applied_layers=["mid"]))
    apply_toma(pipe.unet, **EVERY_STEP)
    assert plans_of(pipe, prompts=2, guidance_scale=4.0, pag_scale=3.0).parts == [3, 3]
    assert plans_of(pipe, guidance_scale=1.0, pag_scale=3.0).parts == [2, 2]
    positions = plans_of(pipe, prompts=2, guidance_scale=4.0, pag_scale=3.0).positions[0]
    for each in positions.values():
        first, second, third = each.chunk(3)
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_three_parts_with_guidance_by_an_image():
    parts = sd15_pipeline(sd15_unet(in_channels=8)).components
    pipe = quiet(StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False))
    apply_toma(pipe.unet, **EVERY_STEP)
    image = torch.rand(1, 3, 128, 128)
    assert plans_of(pipe, image=image, guidance_scale=4.0, image_guidance_scale=1.5).parts == [3, 3]


def test_guidance_switched_off_half_way():
    pipe = sd15_pipeline()
    apply_toma(pipe.unet, **EVERY_STEP)
    cutoff = SDCFGCutoffCallback(cutoff_step_ratio=0.5)
    plans = plans_of(pipe, guidance_scale=4.0, num_inference_steps=4, callback_on_step_end=cutoff)
    assert plans.parts[0] == 2
    assert plans.parts[-1] == 1


def test_views_of_a_panorama_are_left_to_themselves():
    """Several views of one picture make a batch, in another order than other pipelines have."""
    parts = sd15_pipeline().components
    pipe = quiet(StableDiffusionPanoramaPipeline(**parts, requires_safety_checker=False))
    apply_toma(pipe.unet, **EVERY_STEP, selection="strided")
    plans = plans_of(pipe, guidance_scale=4.0, height=64, width=768, view_batch_size=4, num_inference_steps=1)
    assert set(plans.parts) == {1}


class TestSeparatePasses:
    def test_the_second_pass_uses_the_plans_of_the_first(self):
        pipe = flux_pipeline()
        apply_toma(pipe.transformer, **EVERY_STEP)
        with CountOperators() as count:
            plans = plans_of(pipe, true_cfg_scale=4.0, num_inference_steps=3)
        assert len(plans.positions) == 6
        for first, second in zip(plans.positions[::2], plans.positions[1::2], strict=True):
            assert all(torch.equal(first[name], second[name]) for name in first)
        assert count.calls["facility_location"] == 3 * 2  # steps × kinds of block
        assert not torch.equal(plans.positions[0]["joint"], plans.positions[-1]["joint"])

    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    def test_they_choose_as_a_batch_does(self, scope):
        """The tokens that enter the first block of Flux do not depend on the prompt, so both know the same."""
        prompts = [FLUX.inputs(seed=seed, batch=1) for seed in (1, 2)]
        sample = torch.randn_like(prompts[0]["hidden_states"])
        separate, batched = flux_transformer(), flux_transformer()
        settings = EVERY_STEP | {"scope": scope}
        apply_toma(separate, **settings)
        with Plans(separate) as apart, torch.no_grad():
            for prompt in prompts:
                separate(**prompt | {"hidden_states": sample}, return_dict=False)
        apply_toma(batched, **settings, guidance_parts=2)
        shared = ("img_ids", "txt_ids", "return_dict")
        both = {
            name: prompts[0][name] if name in shared else torch.cat([prompts[0][name], prompts[1][name]])
            for name in prompts[0]
        }
        with Plans(batched) as together, torch.no_grad():
            batched(**both | {"hidden_states": sample.repeat(2, 1, 1)}, return_dict=False)
        assert together.parts == [2]
        chosen = together.positions[0]["joint"]
        assert torch.equal(chosen[0], chosen[1])
        for positions in apart.positions:
            assert set(positions["joint"][0].tolist()) == set(chosen[0].tolist())

    def test_tiles_are_no_passes_of_guidance(self):
        model = sd15_unet()
        handle = apply_toma(model, **EVERY_STEP)
        handle.step(0)
        inputs = FAMILIES[0].inputs()
        with Plans(model) as plans, torch.no_grad():
            for _ in range(2):
                model(**inputs | {"sample": torch.randn_like(inputs["sample"])})
        first, second = plans.positions
        assert not any(torch.equal(first[name], second[name]) for name in first)


class TestSetting:
    def test_a_bare_model_is_told(self):
        model = sd15_unet()
        apply_toma(model, **EVERY_STEP, guidance_parts=2)
        inputs = FAMILIES[0].inputs(batch=4)
        with Plans(model) as plans, torch.no_grad():
            model(**inputs)
        assert all(torch.equal(*each.chunk(2)) for each in plans.positions[0].values())
        assert not any(torch.equal(each[0], each[1]) for each in plans.positions[0].values())

    def test_a_bare_model_that_is_told_nothing_keeps_samples_apart(self):
        model = sd15_unet()
        apply_toma(model, **EVERY_STEP)
        with Plans(model) as plans, torch.no_grad():
            model(**FAMILIES[0].inputs(batch=4))
        assert plans.parts == [1]

    def test_one_keeps_everything_apart(self):
        pipe = flux_pipeline()
        apply_toma(pipe.transformer, **EVERY_STEP, guidance_parts=1)
        with CountOperators() as count:
            run(pipe, true_cfg_scale=4.0, num_inference_steps=3)
        assert count.calls["facility_location"] == 3 * 2 * 2

    def test_a_batch_that_cannot_be_divided_is_noted(self):
        model = sd15_unet()
        handle = apply_toma(model, **EVERY_STEP, guidance_parts=3)
        with torch.no_grad():
            model(**FAMILIES[0].inputs(batch=4))
        assert "guidance_parts=3 does not divide a batch of 4" in str(handle.summary())


class TestSizeAwareAttention:
    """Attention with sizes over merged tokens is attention over the tokens themselves, if those are equal."""

    @pytest.mark.parametrize("family", [family for family in FAMILIES if family.name != "sd3"], ids=lambda f: f.name)
    @pytest.mark.parametrize("scope", ["module", "block", "stage"])
    def test_it_changes_the_picture_a_little(self, family, scope):
        pictures = []
        for size_aware in (False, True):
            model = family.build()
            apply_toma(model, **SETTINGS, scope=scope, size_aware_attention=size_aware)
            pictures.append(family.call(model))
        assert not torch.equal(*pictures)
        assert (pictures[0] - pictures[1]).abs().mean() < 0.5 * pictures[0].abs().mean()

    def test_it_is_exact_where_tokens_are_equal(self):
        """A picture of one colour in the left half and another in the right: merged to any number, nothing is lost."""
        model = FAMILIES[0].build()
        block = model.down_blocks[0].attentions[0].transformer_blocks[0]
        left, right = torch.randn(2, 1, 1, 32)
        tokens = torch.cat([left.expand(1, 16, 8, -1), right.expand(1, 16, 8, -1)], dim=2).reshape(1, 256, 32)
        text = torch.randn(1, 7, 32)
        with torch.no_grad():
            whole = block(tokens, encoder_hidden_states=text)
        errors = {}
        for size_aware in (False, True):
            handle = apply_toma(
                model,
                ratio=0.9,
                region="global",
                selection_tokens=256,
                scope="block",
                scale=math.inf,
                distance_weight=3.0,
                size_aware_attention=size_aware,
            )
            state = state_of(model)
            with torch.no_grad():
                model(**FAMILIES[0].inputs(batch=1))  # makes the plans; the block alone then chooses anew
                state.action = type(state.action).SELECT
                for slot in state.slots:
                    slot.awaits_tokens = True
                errors[size_aware] = (block(tokens, encoder_hidden_states=text) - whole).abs().max()
            handle.remove()
        assert errors[True] < 1e-5
        assert errors[False] > 1e-3

    def test_attention_without_a_bias_is_refused(self):
        with pytest.raises(UsageError, match="size_aware_attention=True is not possible here"):
            apply_toma(sd3_transformer(), **SETTINGS, size_aware_attention=True)

    def test_a_mask_of_the_users_own_is_refused(self):
        model = sd15_unet()
        apply_toma(model, **SETTINGS, scope="block", size_aware_attention=True)
        with pytest.raises(UsageError, match="attention_mask"), torch.no_grad():
            model(**FAMILIES[0].inputs(), attention_mask=torch.ones(2, 256))


FLUX = next(family for family in FAMILIES if family.name == "flux")
