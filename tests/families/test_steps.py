"""Which step a call belongs to, read from real pipelines and schedulers, or told."""

import gc
import sys
import warnings

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from diffusers.callbacks import SDCFGCutoffCallback
from observe import state_of
from tiny import SETTINGS, sd15_unet
from tiny_pipelines import (
    PIPELINES,
    denoiser,
    embeds,
    flux_pipeline,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
)

from toma_diffusion import ToMAConfig, apply_toma

LATE = {"config_or_preset": "toma-late", "min_tokens": 0, "num_regions": 4, "skip_blocks": ()}
"""The preset that merges in the second half of the steps, on grids as small as these."""
IMAGE_TO_IMAGE = {
    "sd15": (sd15_pipeline, StableDiffusionImg2ImgPipeline),
    "sdxl": (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline),
    "flux": (flux_pipeline, FluxImg2ImgPipeline),
    "sd3": (sd3_pipeline, StableDiffusion3Img2ImgPipeline),
}
families = pytest.mark.parametrize("name", IMAGE_TO_IMAGE)


class Steps:
    """For every call of a model: the step, the pass over it, and whether anything was merged."""

    def __init__(self, model):
        self.model = model
        self.seen: list[tuple[int, int, bool]] = []

    def __enter__(self):
        self.hook = self.model.register_forward_hook(lambda *_: self._look())
        return self

    def __exit__(self, *error):
        self.hook.remove()

    def _look(self):
        state = state_of(self.model)
        self.seen.append((state._last_tick.step, state._last_tick.ordinal, state.active))

    @property
    def merged(self) -> list[bool]:
        return [active for _, _, active in self.seen]

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(step, ordinal) for step, ordinal, _ in self.seen]


def steps_of(pipe, **arguments) -> Steps:
    with Steps(denoiser(pipe)) as steps:
        run(pipe, **arguments)
    return steps


def image_to_image(pipe, pipeline_class, **changes):
    extra = {"requires_safety_checker": False} if pipeline_class is StableDiffusionImg2ImgPipeline else {}
    return quiet(pipeline_class(**pipe.components | changes, **extra))


def picture() -> torch.Tensor:
    return torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1


def half(count: int) -> list[bool]:
    return [False] * (count // 2) + [True] * (count - count // 2)


class TestImageToImage:
    @families
    def test_after_a_text_to_image_run_over_the_same_components(self, name):
        make, pipeline_class = IMAGE_TO_IMAGE[name]
        pipe = make()
        apply_toma(pipe, **LATE)
        assert steps_of(pipe, num_inference_steps=20).merged == half(20)
        other = image_to_image(pipe, pipeline_class)
        assert steps_of(other, image=picture(), num_inference_steps=20, strength=0.4).merged == half(8)

    @families
    def test_without_any_earlier_run(self, name):
        make, pipeline_class = IMAGE_TO_IMAGE[name]
        pipe = make()
        apply_toma(pipe, **LATE)
        other = image_to_image(pipe, pipeline_class)
        assert steps_of(other, image=picture(), num_inference_steps=20, strength=0.3).merged == half(6)

    @pytest.mark.parametrize("scheduler", [DDIMScheduler, EulerDiscreteScheduler])
    def test_with_a_scheduler_of_its_own(self, scheduler):
        pipe = sd15_pipeline()
        apply_toma(pipe, **LATE)
        other = image_to_image(
            pipe, StableDiffusionImg2ImgPipeline, scheduler=scheduler.from_config(pipe.scheduler.config)
        )
        run(pipe, num_inference_steps=20)
        assert steps_of(other, image=picture(), num_inference_steps=20, strength=0.4).merged == half(8)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_short_run_before_a_long_one(name):
    pipe = PIPELINES[name]()
    apply_toma(pipe, **LATE)
    assert steps_of(pipe, num_inference_steps=4).merged == half(4)
    assert steps_of(pipe, num_inference_steps=20).merged == half(20)
    assert steps_of(pipe, num_inference_steps=4).merged == half(4)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_callback_that_returns_new_prompt_embeddings(name, keep):
    """From Python 3.13 on nothing keeps the old embeddings alive; before it, the frame's `locals()` do."""
    pipe = PIPELINES[name]()
    apply_toma(pipe, **LATE)
    kept = []

    def renew(pipe, step, timestep, tensors):
        kept.append(tensors["prompt_embeds"])
        tensors["prompt_embeds"] = tensors["prompt_embeds"].clone()
        if not keep:
            kept.clear()
            if sys.version_info < (3, 13):
                sys._getframe(1).f_locals.pop("callback_kwargs", None)
            gc.collect()
        return tensors

    if "callback_on_step_end" not in type(pipe).__call__.__annotations__:
        pytest.skip("this pipeline has no such callback")
    arguments = {"callback_on_step_end": renew, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    steps = steps_of(pipe, num_inference_steps=8, **arguments)
    assert steps.merged == half(8)
    assert steps.places == [(step, 0) for step in range(8)]


def test_guidance_cut_off_half_way_is_counted_at_once():
    pipe = sd15_pipeline()
    apply_toma(pipe, **LATE)
    steps = steps_of(pipe, num_inference_steps=10, callback_on_step_end=SDCFGCutoffCallback(0.4))
    assert steps.places == [(step, 0) for step in range(10)]
    assert steps.merged == half(10)


class TestLoopsOfOnesOwn:
    """Over the parts of a pipeline that `apply_toma` got."""

    def loop(self, pipe, seed: int = 0, tiles: int = 1, rebuilt: bool = False) -> None:
        prompt = embeds(pipe)["prompt_embeds"]
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        for t in pipe.scheduler.timesteps:
            conditioning = prompt.clone() if rebuilt else prompt
            noise = [pipe.unet(latents.clone(), t, conditioning).sample for _ in range(tiles)]
            latents = pipe.scheduler.step(noise[0], t, latents).prev_sample

    def test_conditioning_rebuilt_in_every_step(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, **LATE)
        pipe.scheduler.set_timesteps(8)
        with Steps(pipe.unet) as steps, torch.no_grad():
            self.loop(pipe, rebuilt=True)
        assert steps.merged == half(8)

    def test_two_seeds_after_one_set_timesteps(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, **LATE)
        pipe.scheduler.set_timesteps(6)
        with Steps(pipe.unet) as steps, torch.no_grad():
            self.loop(pipe, seed=0)
            self.loop(pipe, seed=1)
        assert steps.merged == half(6) * 2
        assert steps.places == [(step, 0) for step in range(6)] * 2

    @pytest.mark.parametrize("scheduler", [DDIMScheduler, EulerDiscreteScheduler])
    def test_four_tiles_of_a_picture_per_step(self, scheduler):
        pipe = sd15_pipeline()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        apply_toma(pipe, **LATE)
        pipe.scheduler.set_timesteps(6)
        with Steps(pipe.unet) as steps, torch.no_grad():
            self.loop(pipe, tiles=4)
        assert steps.places == [(step, tile) for step in range(6) for tile in range(4)]
        assert steps.merged == [active for active in half(6) for _ in range(4)]


class TestTold:
    def call(self, model) -> None:
        with torch.no_grad():
            model(torch.randn(1, 4, 16, 16), 10, torch.randn(1, 7, 32))

    def test_a_window_on_a_bare_denoiser(self):
        model = sd15_unet()
        handle = apply_toma(model, **SETTINGS, window=(0.5, 1.0))
        with Steps(model) as steps:
            for _ in range(2):
                handle.begin(6)
                for step in range(6):
                    handle.step(step)
                    self.call(model)
        assert steps.merged == half(6) * 2

    def test_begin_alone(self):
        model = sd15_unet()
        handle = apply_toma(model, **SETTINGS, window=(0.5, 1.0))
        handle.begin(6)
        with Steps(model) as steps:
            for _ in range(6):
                self.call(model)
        assert steps.merged == half(6)

    def test_reset_gives_the_steps_back_to_the_pipeline(self):
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, **LATE)
        handle.begin(3)
        handle.reset()
        assert steps_of(pipe, num_inference_steps=8).merged == half(8)


class TestWindowThatNeverOpens:
    def test_it_warns_once_with_the_reason(self):
        pipe = sd15_pipeline()
        apply_toma(pipe, **LATE)
        with pytest.warns(UserWarning, match=r"generation of 1 step was not made.* with window=\(0\.5, 1\.0\)"):
            run(pipe, num_inference_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(pipe, num_inference_steps=1)

    def test_steps_that_were_counted_wrong(self):
        """Nothing tells where a loop stands that hands the model copies of its timesteps: half of it is missing."""
        pipe = sd15_pipeline()
        apply_toma(pipe, **LATE)
        prompt = embeds(pipe)["prompt_embeds"]

        def generate() -> None:
            pipe.scheduler.set_timesteps(20)
            for t in pipe.scheduler.timesteps[16:]:
                pipe.unet(torch.randn(1, 4, 16, 16), int(t), prompt)

        generate()
        with pytest.warns(UserWarning, match=r"4 of 20 steps were counted.*handle\.begin"):
            generate()

    @pytest.mark.parametrize("settings", [{"enabled": False}, {"num_inference_steps": 4}, {"window": (0.0, 1.0)}])
    def test_it_does_not_warn_for_nothing(self, settings):
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, ToMAConfig(**SETTINGS, window=settings.get("window", (0.5, 1.0))))
        handle.enabled = settings.get("enabled", True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                run(pipe, num_inference_steps=settings.get("num_inference_steps", 1))
