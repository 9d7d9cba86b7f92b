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
    StableDiffusionXLImg2ImgPipeline,
    UniPCMultistepScheduler,
)
from pairs import named
from skipping import Runs, counts, skipping
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

from toma_diffusion import UsageError, speed_up

Make = Callable[[], DiffusionPipeline]


def breaking_after(calls: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == calls:
            raise ZeroDivisionError
        return inner(*args, **kwargs)

    return call


class TestEveryGenerationBeginsAnew:
    @pytest.mark.parametrize("name", PIPELINES)
    def test_after_others_after_exceptions_and_after_it_was_off(self, name: str) -> None:
        pipe = PIPELINES[name]()
        original = run(pipe, num_inference_steps=5)
        handle = skipping(pipe, 0, 2)
        first = run(pipe, num_inference_steps=5)
        assert counts(handle) == (2, 3)
        assert not torch.equal(first, original)
        run(pipe, seed=1, num_inference_steps=6)
        assert torch.equal(run(pipe, num_inference_steps=5), first)
        for last in (0, 1):  # in a computed step, or in a skipped one
            broken = patch.object(pipe.scheduler, "step", breaking_after(last, pipe.scheduler.step))
            with broken, pytest.raises(ZeroDivisionError):
                run(pipe, seed=1, num_inference_steps=5)
            assert torch.equal(run(pipe, num_inference_steps=5), first)
        handle.enabled = False
        assert torch.equal(run(pipe, num_inference_steps=5), original)
        handle.enabled = True
        assert torch.equal(run(pipe, num_inference_steps=5), first)
        handle.remove()
        assert torch.equal(run(pipe, num_inference_steps=5), original)

    @pytest.mark.parametrize("make", [sd15_pipeline, flux_pipeline])
    def test_after_an_interrupt(self, make: Make) -> None:
        """As callbacks do it: the rest of the loop is passed over."""
        pipe = make()
        handle = skipping(pipe, 0, 2)
        expected = run(pipe, num_inference_steps=5)

        def interrupt(pipe: Any, step: int, timestep: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            pipe._interrupt = step >= 1
            return tensors

        with Runs(denoiser(pipe)) as runs:
            run(pipe, seed=1, num_inference_steps=5, callback_on_step_end=interrupt)
        assert runs.steps == [0]
        assert torch.equal(run(pipe, num_inference_steps=5), expected)
        assert counts(handle) == (2, 3)


class TestPresets:
    """The number of computed steps follows from the number of steps."""

    @pytest.mark.parametrize(
        ("preset", "expected"), [("balanced", (12, 6)), ("fast", (8, 5)), ("faster", (6, 4))], ids=["b", "f", "ff"]
    )
    def test_of_twenty_steps_and_of_eight(self, preset: str, expected: tuple[int, int]) -> None:
        pipe = flux_pipeline()
        handle = speed_up(pipe, preset)
        for steps, computed in zip((20, 8), expected, strict=True):
            run(pipe, num_inference_steps=steps)
            assert counts(handle) == (computed, steps - computed)

    def test_without_a_number_of_steps_it_says_what_to_do(self) -> None:
        model = flux_pipeline().transformer
        speed_up(model, "fast")
        with pytest.raises(RuntimeError, match=r"handle\.begin\(num_steps\)"):
            model(torch.zeros(1, 16, 4))


@pytest.mark.parametrize(
    ("make", "pipeline_class"),
    [(sdxl_pipeline, StableDiffusionXLImg2ImgPipeline), (flux_pipeline, FluxImg2ImgPipeline)],
    ids=["sdxl", "flux"],
)
def test_image_to_image(make: Make, pipeline_class: Any) -> None:
    """Steps are counted from the first that is made, whatever the strength."""
    pipe = make()
    handle = skipping(pipe, 0, 1, 4)
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    other = quiet(pipeline_class(**parts))
    image = torch.rand(1, 3, 128, 128) * 2 - 1
    for strength, steps in ((0.3, 6), (1.0, 20)):
        with Runs(denoiser(pipe)) as runs:
            assert run(other, image=image, num_inference_steps=20, strength=strength).isfinite().all()
        assert runs.steps == [0, 1, 4]
        assert counts(handle) == (3, steps - 3)
    with Runs(denoiser(pipe)) as runs:
        run(pipe, num_inference_steps=6)
    assert runs.steps == [0, 1, 4]


def test_inpainting_with_nine_channels() -> None:
    """What goes in has more channels than what comes out."""
    pipe = inpainting_pipeline()
    mask = torch.zeros(1, 1, 128, 128)
    mask[..., 64:] = 1
    arguments = {"image": torch.rand(1, 3, 128, 128), "mask_image": mask, "height": 128, "width": 128}
    arguments |= {"num_inference_steps": 8, "strength": 0.5}
    whole = run(pipe, **arguments)
    skipping(pipe, 0, 2)
    with Runs(pipe.unet) as runs:
        predicted = run(pipe, **arguments)
    assert runs.steps == [0, 2]
    assert predicted.isfinite().all()
    assert not torch.equal(predicted, whole)


def test_of_two_denoisers_each_is_predicted_from_itself() -> None:
    """Wan 2.2: the second takes over in the middle, and computes its first step, whatever the plan is."""
    pipe = wan_pipeline(experts=2)
    whole = generate(pipe, steps=6)
    handle = skipping(pipe, 0, 2)
    for seed in (0, 1):  # the second generation begins anew
        with Runs(pipe.transformer) as one, Runs(pipe.transformer_2) as other:
            assert generate(pipe, steps=6, seed=seed).isfinite().all()
        takes_over = min(other.steps)
        assert 0 < takes_over < 6
        assert one.steps == [0, 2][: len(one.steps)]
        assert other.steps == sorted({takes_over, 2} & set(range(takes_over, 6)))
    found = [each.skip for each in (handle.summary(), *handle.summary().others)]
    assert [each and each.num_computed for each in found] == [len(one.steps), len(other.steps)]
    assert sum(each.num_computed + each.num_predicted for each in found if each) == 6
    handle.remove()
    assert torch.equal(generate(pipe, steps=6), whole)


class TestSchedulers:
    @pytest.mark.parametrize(
        ("scheduler", "settings"),
        [
            (DDPMScheduler, {}),
            (EulerAncestralDiscreteScheduler, {}),
            (LCMScheduler, {}),
            (EulerDiscreteScheduler, {}),
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
        whole, far = (run(pipe, num_inference_steps=10, seed=seed) for seed in (0, 1))
        skipping(pipe, 0, 1, 2, 3, 5, 7, 9)
        with Runs(pipe.unet) as runs:
            predicted = run(pipe, num_inference_steps=10)
        assert runs.steps == [0, 1, 2, 3, 5, 7, 9]
        assert torch.equal(run(pipe, num_inference_steps=10), predicted)
        assert 0 < (predicted - whole).abs().mean() < 0.5 * (far - whole).abs().mean()

    @pytest.mark.parametrize("eta", [0.0, 1.0])
    def test_ddim_with_noise(self, eta: float) -> None:
        pipe = sd15_pipeline()
        handle = skipping(pipe, 0, 2)
        run(pipe, num_inference_steps=5, eta=eta)
        assert ("the clean image stays" if eta else "noise and clean image stay") in str(handle.summary())

    @pytest.mark.parametrize(
        ("make", "scheduler", "settings"),
        [
            (sd15_pipeline, HeunDiscreteScheduler, {}),
            (sd15_pipeline, KDPM2DiscreteScheduler, {}),
            (sd15_pipeline, KDPM2AncestralDiscreteScheduler, {}),
            (sd15_pipeline, PNDMScheduler, {"skip_prk_steps": False}),
            (sd3_pipeline, FlowMatchHeunDiscreteScheduler, {}),
        ],
        ids=named,
    )
    def test_several_evaluations_a_step_are_refused(self, make: Make, scheduler: Any, settings: dict[str, Any]) -> None:
        pipe = make()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config, **settings)
        handle = skipping(pipe, 0, 2)
        with pytest.raises(UsageError, match=f"{scheduler.__name__} evaluates the denoiser more than once"):
            run(pipe, num_inference_steps=4)
        handle.enabled = False
        assert run(pipe, num_inference_steps=4).isfinite().all()

    def test_another_one_in_the_same_pipeline(self) -> None:
        """Exchanged between two generations, its own noise levels count."""
        pipe, fresh = sd15_pipeline(), sd15_pipeline()
        skipping(pipe, 0, 2)
        run(pipe, num_inference_steps=5)
        for each in (pipe, fresh):
            each.scheduler = DPMSolverMultistepScheduler.from_config(each.scheduler.config)
        skipping(fresh, 0, 2)
        assert torch.equal(run(pipe, num_inference_steps=5), run(fresh, num_inference_steps=5))
