"""Skipped steps in real pipelines: which steps run the denoiser, and that every generation begins anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import diffusers
import pytest
import torch
from pairs import named
from skipping import Runs, counts, skipping
from tiny_pipelines import (
    PIPELINES,
    denoiser,
    flux_pipeline,
    generate,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
    wan_pipeline,
)
from torch import Tensor

from toma_diffusion import UsageError

Make = Callable[[], diffusers.DiffusionPipeline]


class TestEveryGenerationBeginsAnew:
    @pytest.mark.parametrize("name", ["sd15", "flux"])
    def test_after_others_after_exceptions_and_after_it_was_off(self, name: str) -> None:
        pipe = PIPELINES[name]()
        original = run(pipe, num_inference_steps=5)
        handle = skipping(pipe, 0, 2)
        first = run(pipe, num_inference_steps=5)
        assert counts(handle) == (2, 3)
        assert not torch.equal(first, original)
        run(pipe, seed=1, num_inference_steps=6)
        assert torch.equal(run(pipe, num_inference_steps=5), first)
        step = pipe.scheduler.step
        for effects in ([ZeroDivisionError], [DEFAULT, ZeroDivisionError]):  # after a computed step, or a skipped one
            broken = patch.object(pipe.scheduler, "step", Mock(wraps=step, side_effect=effects))
            with broken, pytest.raises(ZeroDivisionError):
                run(pipe, seed=1, num_inference_steps=5)
            assert torch.equal(run(pipe, num_inference_steps=5), first)
        handle.enabled = False
        assert torch.equal(run(pipe, num_inference_steps=5), original)
        handle.enabled = True
        assert torch.equal(run(pipe, num_inference_steps=5), first)
        handle.remove()
        assert torch.equal(run(pipe, num_inference_steps=5), original)

    def test_after_an_interrupt(self) -> None:
        """As callbacks do it: the rest of the loop is passed over."""
        pipe = flux_pipeline()
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


@pytest.mark.parametrize(
    ("make", "pipeline_class"),
    [(sdxl_pipeline, diffusers.StableDiffusionXLImg2ImgPipeline), (flux_pipeline, diffusers.FluxImg2ImgPipeline)],
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
            (diffusers.DDPMScheduler, {}),
            (diffusers.EulerAncestralDiscreteScheduler, {}),
            (diffusers.LCMScheduler, {}),
            (diffusers.EulerDiscreteScheduler, {}),
            (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
            (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
            (diffusers.UniPCMultistepScheduler, {}),
            (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
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
            (sd15_pipeline, diffusers.HeunDiscreteScheduler, {}),
            (sd15_pipeline, diffusers.KDPM2DiscreteScheduler, {}),
            (sd15_pipeline, diffusers.KDPM2AncestralDiscreteScheduler, {}),
            (sd15_pipeline, diffusers.PNDMScheduler, {"skip_prk_steps": False}),
            (sd3_pipeline, diffusers.FlowMatchHeunDiscreteScheduler, {}),
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
            each.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(each.scheduler.config)
        skipping(fresh, 0, 2)
        assert torch.equal(run(pipe, num_inference_steps=5), run(fresh, num_inference_steps=5))
