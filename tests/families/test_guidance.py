"""The parts of guidance choose together: in a batch, or in several passes over one sample."""

import pytest
import torch
from diffusers import (
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPanoramaPipeline,
)
from diffusers.callbacks import SDCFGCutoffCallback
from merging import merged, steady
from observe import CountOperators, same_picture, state_of
from tiny import SCOPES, flux_transformer, one, sd15_unet
from tiny_pipelines import (
    PIPELINES,
    VIDEO_PIPELINES,
    denoiser,
    embeds,
    flux_pipeline,
    generate,
    pipeline,
    quiet,
    run,
    sd15_pipeline,
)

from toma_diffusion import UsageError

BATCHED = ("sd15", "sd3")
IN_ONE_BATCH = ("cogvideox", "mochi", "ltx2")


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


def halves_agree(positions: dict[str, torch.Tensor], parts: int = 2) -> bool:
    chunks = [each.chunk(parts) for each in positions.values()]
    return all(torch.equal(first, other) for first, *others in chunks for other in others)


@pytest.mark.parametrize("name", BATCHED)
class TestBatches:
    def test_both_halves_choose_together(self, name):
        pipe = PIPELINES[name]()
        handle = merged(pipe)
        plans = plans_of(pipe, guidance_scale=4.0)
        assert set(plans.parts) == {2}
        assert all(map(halves_agree, plans.positions))
        assert "2 parts of guidance choose together" in str(handle.summary())
        assert set(plans_of(pipe, prompts=2, guidance_scale=1.0).parts) == {1}  # without guidance there are no parts

    def test_a_batch_of_pictures_equals_single_pictures(self, name):
        """Also of their prompts: each picture's two halves share a plan, not each prompt's."""
        pipe = PIPELINES[name]()
        merged(pipe)
        prompts = embeds(pipe, 3)
        noise = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(5))
        together = run(pipe, prompts=3, latents=noise, guidance_scale=4.0)
        for index in range(3):
            own = {
                key: value[index : index + 1] if isinstance(value, torch.Tensor) else value
                for key, value in prompts.items()
            }
            alone = run(pipe, latents=noise[index : index + 1], guidance_scale=4.0, **own)
            same_picture(together[index : index + 1], alone)


class TestOtherBatches:
    def test_three_parts_with_perturbed_attention(self):
        parts = {name: part for name, part in sd15_pipeline().components.items() if name != "image_encoder"}
        pipe = quiet(StableDiffusionPAGPipeline(**parts, requires_safety_checker=False, pag_applied_layers=["mid"]))
        merged(pipe)
        plans = plans_of(pipe, prompts=2, guidance_scale=4.0, pag_scale=3.0)
        assert plans.parts == [3, 3]
        assert halves_agree(plans.positions[0], 3)
        assert plans_of(pipe, guidance_scale=1.0, pag_scale=3.0).parts == [2, 2]

    def test_three_parts_with_guidance_by_an_image(self):
        parts = sd15_pipeline(sd15_unet(in_channels=8)).components
        pipe = quiet(StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False))
        merged(pipe)
        image = torch.rand(1, 3, 128, 128)
        assert plans_of(pipe, image=image, guidance_scale=4.0, image_guidance_scale=1.5).parts == [3, 3]

    def test_guidance_switched_off_half_way(self):
        pipe = sd15_pipeline()
        merged(pipe)
        cutoff = SDCFGCutoffCallback(cutoff_step_ratio=0.5)
        plans = plans_of(pipe, guidance_scale=4.0, num_inference_steps=4, callback_on_step_end=cutoff)
        assert (plans.parts[0], plans.parts[-1]) == (2, 1)

    def test_views_of_a_panorama_are_left_to_themselves(self):
        """Several views of one picture make a batch, in another order than other pipelines have."""
        pipe = quiet(StableDiffusionPanoramaPipeline(**sd15_pipeline().components, requires_safety_checker=False))
        steady(pipe)
        plans = plans_of(pipe, guidance_scale=4.0, height=64, width=768, view_batch_size=4, num_inference_steps=1)
        assert set(plans.parts) == {1}


class TestSeparatePasses:
    def test_the_second_pass_uses_the_plans_of_the_first(self):
        pipe = flux_pipeline()
        handle = merged(pipe)
        with CountOperators() as count:
            plans = plans_of(pipe, true_cfg_scale=4.0, num_inference_steps=3)
        assert len(plans.positions) == 6
        for first, second in zip(plans.positions[::2], plans.positions[1::2], strict=True):
            assert all(torch.equal(first[name], second[name]) for name in first)
        assert count.calls["facility_location"] == 3 * 2  # steps × kinds of block
        assert not torch.equal(plans.positions[0]["joint"], plans.positions[-1]["joint"])
        assert "passes over one sample share a plan" in str(handle.summary())

    @pytest.mark.parametrize("scope", SCOPES)
    def test_they_choose_as_a_batch_does(self, scope):
        """The tokens that enter the first block of Flux do not depend on the prompt, so both know the same."""
        prompts = [one("flux").inputs(seed=seed, batch=1) for seed in (1, 2)]
        sample = torch.randn_like(prompts[0]["hidden_states"])
        separate, batched = flux_transformer(), flux_transformer()
        merged(separate, scope=scope)
        with Plans(separate) as apart, torch.no_grad():
            for prompt in prompts:
                separate(**prompt | {"hidden_states": sample}, return_dict=False)
        merged(batched, scope=scope, guidance_parts=2)
        shared = ("img_ids", "txt_ids")
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
        handle = merged(model)
        handle.step(0)
        inputs = one("sd15").inputs()
        with Plans(model) as plans, torch.no_grad():
            for _ in range(2):
                model(**inputs | {"sample": torch.randn_like(inputs["sample"])})
        first, second = plans.positions
        assert not any(torch.equal(first[name], second[name]) for name in first)

    def test_one_keeps_everything_apart(self):
        pipe = flux_pipeline()
        merged(pipe, guidance_parts=1)
        with CountOperators() as count:
            run(pipe, true_cfg_scale=4.0, num_inference_steps=3)
        assert count.calls["facility_location"] == 3 * 2 * 2


class TestBareModel:
    def test_it_is_told(self):
        model = sd15_unet()
        merged(model, guidance_parts=2)
        with Plans(model) as plans, torch.no_grad():
            model(**one("sd15").inputs(batch=4))
        assert halves_agree(plans.positions[0])
        assert not any(torch.equal(each[0], each[1]) for each in plans.positions[0].values())

    def test_a_batch_that_cannot_be_divided(self):
        model = sd15_unet()
        merged(model, guidance_parts=3)
        with pytest.raises(UsageError, match="guidance_parts=3 does not divide a batch of 4"), torch.no_grad():
            model(**one("sd15").inputs(batch=4))


@pytest.mark.parametrize("name", VIDEO_PIPELINES)
def test_video_pipelines(name):
    pipe = pipeline(name)
    handle = merged(pipe)
    found = set()
    pipe.transformer.register_forward_hook(lambda *_: found.add(handle.summary().merge.guidance))
    generate(pipe, steps=2)
    shared = "2 parts of guidance choose together" if name in IN_ONE_BATCH else "passes over one sample share a plan"
    assert any(shared in guidance for guidance in found)
