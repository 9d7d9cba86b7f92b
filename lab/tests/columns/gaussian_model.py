"""A model whose data are a Gaussian: what every solver should come to is known."""

import copy

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

SPREAD = 0.7
"""The standard deviation of the data."""


def noise() -> torch.Tensor:
    return torch.randn(1, 4, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def solved(scheduler, predict, steps, **arguments):
    """What a solver makes of noise. `predict` is called with the number of the step, the sample and the timestep."""
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(steps, **arguments)
    is_flow = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    sample = noise() if is_flow else noise() * scheduler.init_noise_sigma
    for number, timestep in enumerate(scheduler.timesteps):
        scaled = sample if is_flow else scheduler.scale_model_input(sample, timestep)
        sample = scheduler.step(predict(number, scaled, timestep), timestep, sample, return_dict=False)[0]
    return sample


class Gaussian:
    """The best prediction from a sample, of the kind that the scheduler wants."""

    def __init__(self, scheduler) -> None:
        self.kind = "flow" if is_flow(scheduler) else scheduler.config.prediction_type
        if self.kind != "flow":
            self.alphas = scheduler.alphas_cumprod.double().numpy()

    def __call__(self, number, sample, timestep):
        image, noise_part = self.parts(float(timestep))
        variance = image**2 * SPREAD**2 + noise_part**2
        clean, noisy = sample * image * SPREAD**2 / variance, sample * noise_part / variance
        return {"epsilon": noisy, "v_prediction": image * noisy - noise_part * clean, "flow": noisy - clean}[self.kind]

    def parts(self, timestep) -> tuple[float, float]:
        """How much of the image and of the noise a sample has."""
        if self.kind == "flow":
            return 1 - timestep / 1000, timestep / 1000
        levels = np.log((1 - self.alphas) / self.alphas.clip(1e-12))
        alpha = 1 / (1 + np.exp(np.interp(timestep, np.arange(1000), levels)))
        return alpha**0.5, (1 - alpha) ** 0.5

    def error(self, scheduler, steps, **arguments) -> float:
        """The distance to what noise of the first level becomes, relative to it."""
        scheduler = copy.deepcopy(scheduler)
        scheduler.set_timesteps(steps, **arguments)
        image, noise_part = self.parts(float(scheduler.timesteps[0]))
        exact = noise() * SPREAD / (image**2 * SPREAD**2 + noise_part**2) ** 0.5
        return float((solved(scheduler, self, steps, **arguments) - exact).norm() / exact.norm())


def is_flow(scheduler) -> bool:
    return isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or bool(scheduler.config.get("use_flow_sigmas"))
