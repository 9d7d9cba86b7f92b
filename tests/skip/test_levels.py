"""The noise levels that are read from schedulers of diffusers, and what they make of the first prediction."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from inspect import signature
from itertools import product
from typing import Any

import diffusers
import pytest
import torch
from pairs import in_turn, named
from skipping import skipping
from torch import Tensor, nn

from toma_diffusion.skip.levels import read_levels

STEPS = 6
PREDICTIONS = ("epsilon", "v_prediction", "sample")


class Denoiser(nn.Module):
    """Another output for every sample."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return torch.tanh(sample) * 0.7 + 0.1


def generation(scheduler: Any, computed: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of every step: its time, its noisy sample, and what a denoiser returned for it, computed or predicted."""
    model = Denoiser()
    handle = skipping(model, *computed)
    scheduler.set_timesteps(STEPS)
    handle.begin(STEPS, scheduler)
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 4, 4, 4, generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    extra = {"generator": generator} if "generator" in signature(scheduler.step).parameters else {}
    for step, time in enumerate(scheduler.timesteps):
        handle.step(step)
        scaled = scheduler.scale_model_input(sample, time) if hasattr(scheduler, "scale_model_input") else sample
        output = model(scaled, time)
        yield time, sample, output
        sample = scheduler.step(output, time, sample, **extra).prev_sample


def same(images: list[Tensor]) -> None:
    """All close to the first, as far as float32 allows where noise is many times the image."""
    for image in images[1:]:
        torch.testing.assert_close(image, images[0], rtol=0, atol=2e-3 * float(images[0].abs().max()))


@pytest.mark.parametrize(
    ("scheduler", "prediction"),
    [
        *product((diffusers.DDIMScheduler, diffusers.EulerDiscreteScheduler, diffusers.DDPMScheduler), PREDICTIONS),
        (diffusers.EulerAncestralDiscreteScheduler, "epsilon"),
    ],
    ids=named,
)
def test_the_clean_image_is_held(scheduler: Any, prediction: str) -> None:
    """Up to the last step. Solvers of first order then make one step over all that is skipped."""
    settings = {} if "Euler" in scheduler.__name__ else {"clip_sample": False}
    made = scheduler(prediction_type=prediction, **settings)
    same([deepcopy(made).step(output, *at).pred_original_sample for *at, output in generation(made, (0,))])


ON_THE_IMAGE = [
    (diffusers.DPMSolverMultistepScheduler, {}),
    (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
    (diffusers.DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
    (diffusers.DPMSolverSinglestepScheduler, {}),
    (diffusers.UniPCMultistepScheduler, {}),
]


@pytest.mark.parametrize(
    ("scheduler", "settings", "prediction"),
    [
        *((*each, prediction) for each, prediction in in_turn(ON_THE_IMAGE, PREDICTIONS)),
        (diffusers.EDMDPMSolverMultistepScheduler, {}, "epsilon"),
    ],
    ids=named,
)
def test_of_solvers_that_work_on_the_image(scheduler: Any, settings: dict[str, Any], prediction: str) -> None:
    made = scheduler(prediction_type=prediction, **settings)
    images = []
    for _, sample, output in generation(made, (0,)):
        if made.step_index is None:
            made._init_step_index(made.timesteps[0])
        images.append(made.convert_model_output(output, sample=sample))
    same(images)


@pytest.mark.parametrize("settings", [{}, {"shift": 3.0}, {"stochastic_sampling": True}], ids=str)
def test_of_flow_models(settings: dict[str, Any]) -> None:
    made = diffusers.FlowMatchEulerDiscreteScheduler(**settings)
    same([x - made.sigmas[step] * output for step, (_, x, output) in enumerate(generation(made, (0,)))])


def test_one_step_of_a_flow_solver_over_all_skipped_ones() -> None:
    """The sample of the next computed step is that of the solver on the computed steps alone."""
    made = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    steps = list(generation(made, (0, 4)))
    (_, first, output), (_, reached, _) = steps[0], steps[4]
    torch.testing.assert_close(reached, first + (made.sigmas[4] - made.sigmas[0]) * output)


@pytest.mark.parametrize(
    "scheduler",
    [
        diffusers.DDIMScheduler(),
        diffusers.EulerDiscreteScheduler(),
        diffusers.EulerDiscreteScheduler(use_karras_sigmas=True),
        diffusers.DPMSolverMultistepScheduler(),
        diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        diffusers.EDMEulerScheduler(),
    ],
    ids=named,
)
def test_the_signal_rises_from_step_to_step(scheduler: Any) -> None:
    scheduler.set_timesteps(STEPS)
    levels, late = read_levels(scheduler, 0, STEPS), read_levels(scheduler, 2, STEPS - 2)
    assert levels is not None
    assert late is not None
    assert len(levels.angles) == STEPS
    assert levels.log_signal_to_noise == sorted(set(levels.log_signal_to_noise))
    assert late.angles == levels.angles[2:]


def test_a_scheduler_that_is_not_known_has_none() -> None:
    class Unknown:
        timesteps = torch.arange(STEPS)

    assert read_levels(Unknown(), 0, STEPS) is None
