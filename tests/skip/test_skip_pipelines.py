"""Skipped steps in real pipelines: which steps run the denoiser, and that every generation begins anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
    UniPCMultistepScheduler,
)
from pairs import named
from skipping import Runs, only_skip
from tiny_pipelines import (
    PIPELINES,
    denoiser,
    flux_pipeline,
    generate,
    inpainting_pipeline,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
    wan_pipeline,
)
from torch import Tensor

from toma_diffusion import UsageError, apply_toma, remove_toma, toma_enabled

Make = Callable[[], DiffusionPipeline]


@pytest.mark.parametrize("name", PIPELINES)
class TestEveryPipeline:
    def test_a_second_generation_equals_the_first(self, name: str) -> None:
        """Another one in between leaves nothing behind."""
        pipe = PIPELINES[name]()
        original = run(pipe, num_inference_steps=4)
        apply_toma(pipe, only_skip(0, 1, 3))
        first = run(pipe, num_inference_steps=4)
        run(pipe, seed=1, num_inference_steps=6)
        assert torch.equal(run(pipe, num_inference_steps=4), first)
        assert not torch.equal(first, original)
        with toma_enabled(pipe, False):
            assert torch.equal(run(pipe, num_inference_steps=4), original)
        assert torch.equal(run(pipe, num_inference_steps=4), first)
        remove_toma(pipe)
        assert torch.equal(run(pipe, num_inference_steps=4), original)

    def test_after_an_exception(self, name: str) -> None:
        """In a computed step, or in a skipped one."""
        pipe = PIPELINES[name]()
        handle = apply_toma(pipe, only_skip(0, 2))
        expected = run(pipe, num_inference_steps=5)
        for last in (0, 1, 2):
            broken = patch.object(pipe.scheduler, "step", breaking_after(last, pipe.scheduler.step))
            with broken, pytest.raises(ZeroDivisionError):
                run(pipe, seed=1, num_inference_steps=5)
            assert torch.equal(run(pipe, num_inference_steps=5), expected)
            assert handle.summary().steps == (2, 3)


def breaking_after(calls: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == calls:
            raise ZeroDivisionError
        return inner(*args, **kwargs)

    return call


@pytest.mark.parametrize("make", [sd15_pipeline, flux_pipeline])
def test_an_interrupt(make: Make) -> None:
    """As callbacks do it: the rest of the loop is passed over."""
    pipe = make()
    handle = apply_toma(pipe, only_skip(0, 2))
    expected = run(pipe, num_inference_steps=5)

    def interrupt(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pipe._interrupt = step >= 1
        return tensors

    with Runs(denoiser(pipe)) as runs:
        run(pipe, seed=1, num_inference_steps=5, callback_on_step_end=interrupt)
    assert runs.steps == [0]
    assert torch.equal(run(pipe, num_inference_steps=5), expected)
    assert handle.summary().steps == (2, 3)


@pytest.mark.parametrize(
    ("make", "pipeline_class", "extra"),
    [
        (sd15_pipeline, StableDiffusionImg2ImgPipeline, {"requires_safety_checker": False}),
        (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline, {}),
        (flux_pipeline, FluxImg2ImgPipeline, {}),
        (sd3_pipeline, StableDiffusion3Img2ImgPipeline, {}),
    ],
    ids=["sd15", "sdxl", "flux", "sd3"],
)
def test_image_to_image(make: Make, pipeline_class: Any, extra: dict[str, Any]) -> None:
    """Steps are counted from the first that is made, whatever the strength."""
    pipe = make()
    handle = apply_toma(pipe, only_skip(0, 1, 4))
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    other = quiet(pipeline_class(**parts | ({"feature_extractor": None} if extra else {}), **extra))
    image = torch.rand(1, 3, 128, 128) * 2 - 1
    for strength, steps in ((0.3, 6), (0.6, 12), (1.0, 20)):
        with Runs(denoiser(pipe)) as runs:
            torch.manual_seed(0)
            result = run(other, image=image, num_inference_steps=20, strength=strength)
        assert runs.steps == [0, 1, 4]
        assert handle.summary().steps == (3, steps - 3)
        assert result.isfinite().all()
    with Runs(denoiser(pipe)) as runs:
        run(pipe, num_inference_steps=6)
    assert runs.steps == [0, 1, 4]


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_inpainting_with_nine_channels(strength: float) -> None:
    """What goes in has more channels than what comes out."""
    pipe = inpainting_pipeline()
    mask = torch.zeros(1, 1, 128, 128)
    mask[..., 64:] = 1
    arguments = {"image": torch.rand(1, 3, 128, 128), "mask_image": mask, "height": 128, "width": 128}
    arguments |= {"num_inference_steps": 8, "strength": strength}
    whole = run(pipe, **arguments)
    handle = apply_toma(pipe, only_skip(0, 2))
    with Runs(pipe.unet) as runs:
        predicted = run(pipe, **arguments)
    assert runs.steps == [0, 2]
    assert predicted.isfinite().all()
    assert not torch.equal(predicted, whole)
    handle.remove()
    assert torch.equal(run(pipe, **arguments), whole)


class TestTwoDenoisers:
    """Wan 2.2: the second denoiser takes over in the middle."""

    def test_each_is_predicted_from_itself(self) -> None:
        """The second computes its first step, whatever the plan is: it has returned nothing yet."""
        pipe = wan_pipeline(experts=2)
        whole = generate(pipe, steps=6)
        handle = apply_toma(pipe, only_skip(0, 2))
        for seed in (0, 1):  # the second generation begins anew
            ran: list[list[int]] = []
            generate_steps(pipe, ran, seed)
            first, second = ran
            assert first == [0, 2][: len(first)]
            takes_over = min(second)
            assert 0 < takes_over < 6
            assert second == sorted({takes_over, 2} & set(range(takes_over, 6)))
        one, other = handle.summary(), handle.summary().others[0]
        assert one.steps == (len(first), takes_over - len(first))
        assert other.steps == (len(second), 6 - takes_over - len(second))
        handle.remove()
        assert torch.equal(generate(pipe, steps=6), whole)


def generate_steps(pipe: Any, ran: list[list[int]], seed: int) -> None:
    with Runs(pipe.transformer) as one, Runs(pipe.transformer_2) as other:
        assert generate(pipe, steps=6, seed=seed).isfinite().all()
    ran += [one.steps, other.steps]


class TestSchedulers:
    @pytest.mark.parametrize(
        ("scheduler", "settings"),
        [
            (DDPMScheduler, {}),
            (EulerAncestralDiscreteScheduler, {}),
            (LCMScheduler, {}),
            (EulerDiscreteScheduler, {}),
            (DPMSolverMultistepScheduler, {}),
            (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
            (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
            (UniPCMultistepScheduler, {}),
            (PNDMScheduler, {"skip_prk_steps": True}),
        ],
        ids=named,
    )
    def test_one_evaluation_a_step(self, scheduler: Any, settings: dict[str, Any]) -> None:
        """Also those that add noise: the same seed gives the same picture, close to that of all steps."""
        pipe = sd15_pipeline()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **settings)
        whole = run(pipe, num_inference_steps=10)
        far = run(pipe, num_inference_steps=10, seed=1)
        apply_toma(pipe, only_skip(0, 1, 2, 3, 5, 7, 9))
        with Runs(pipe.unet) as runs:
            predicted = run(pipe, num_inference_steps=10)
        assert runs.steps == [0, 1, 2, 3, 5, 7, 9]
        assert torch.equal(run(pipe, num_inference_steps=10), predicted)
        assert 0 < (predicted - whole).abs().mean() < 0.5 * (far - whole).abs().mean()

    @pytest.mark.parametrize("eta", [0.0, 1.0])
    def test_ddim_with_noise(self, eta: float) -> None:
        pipe = sd15_pipeline()
        handle = apply_toma(pipe, only_skip(0, 2))
        run(pipe, num_inference_steps=5, eta=eta)
        held = "the clean image stays" if eta else "noise and clean image stay"
        assert held in str(handle.summary())

    @pytest.mark.parametrize(
        ("scheduler", "settings"),
        [
            (HeunDiscreteScheduler, {}),
            (KDPM2DiscreteScheduler, {}),
            (KDPM2AncestralDiscreteScheduler, {}),
            (PNDMScheduler, {"skip_prk_steps": False}),
        ],
        ids=named,
    )
    def test_several_evaluations_a_step_are_refused(self, scheduler: Any, settings: dict[str, Any]) -> None:
        pipe = sd15_pipeline()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **settings)
        whole = run(pipe, num_inference_steps=4)
        handle = apply_toma(pipe, only_skip(0, 2))
        with pytest.raises(UsageError, match=f"{scheduler.__name__} evaluates the denoiser more than once"):
            run(pipe, num_inference_steps=4)
        handle.enabled = False
        assert torch.equal(run(pipe, num_inference_steps=4), whole)

    def test_heun_for_flow_models_is_refused(self) -> None:
        pipe = sd3_pipeline()
        pipe.scheduler = FlowMatchHeunDiscreteScheduler.from_config(pipe.scheduler.config)
        apply_toma(pipe, only_skip(0, 2))
        with pytest.raises(UsageError, match="FlowMatchHeunDiscreteScheduler evaluates the denoiser more than once"):
            run(pipe, num_inference_steps=4)

    def test_another_one_in_the_same_pipeline(self) -> None:
        """Exchanged between two generations, its own noise levels count."""
        pipe, fresh = sd15_pipeline(), sd15_pipeline()
        apply_toma(pipe, only_skip(0, 2))
        run(pipe, num_inference_steps=5)
        for each in (pipe, fresh):
            each.scheduler = DPMSolverMultistepScheduler.from_config(each.scheduler.config)
        apply_toma(fresh, only_skip(0, 2))
        assert torch.equal(run(pipe, num_inference_steps=5), run(fresh, num_inference_steps=5))
