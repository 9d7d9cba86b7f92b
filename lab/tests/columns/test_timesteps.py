"""Some of a pipeline's own timesteps: the same as holding what the model predicted over the others."""

import copy

import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from gaussian_model import noise, solved
from tiny_pipelines import (
    BETAS,
    denoiser,
    flux_pipeline,
    pixart_pipeline,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
)
from toma_lab.columns import ColumnSpec, columns_of, parse_shortcut
from toma_lab.columns.thinned import thinned

from toma_diffusion import UsageError

STEPS = 20
COMPUTED = (0, 1, 2, 4, 7, 13)
TEXT = "timesteps:computed=(0,1,2,4,7,13)"
PLAIN = {"clip_sample": False}
VP = DDIMScheduler(**BETAS).alphas_cumprod
DDIMS = {
    "leading": DDIMScheduler(**BETAS, **PLAIN, steps_offset=1, set_alpha_to_one=False),
    "trailing, v": DDIMScheduler(
        **BETAS,
        **PLAIN,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        prediction_type="v_prediction",
    ),
    "CogVideoX": CogVideoXDDIMScheduler(
        **PLAIN, timestep_spacing="trailing", rescale_betas_zero_snr=True, prediction_type="v_prediction"
    ),
}
EULERS = {
    spacing: EulerDiscreteScheduler(**BETAS, timestep_spacing=spacing)
    for spacing in ("leading", "linspace", "trailing")
}
FLOWS = {
    "shift": (FlowMatchEulerDiscreteScheduler(shift=3.0), {}),
    "dynamic shift": (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), {"mu": 0.9}),
    "inverted": (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), {}),
}
MULTISTEP = {
    "dpmpp": DPMSolverMultistepScheduler(**BETAS),
    "dpmpp karras": DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
    "unipc flow": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}
SCHEDULERS = {
    **{f"ddim {name}": (each, {}) for name, each in DDIMS.items()},
    "ddim linspace": (DDIMScheduler(**BETAS, **PLAIN, timestep_spacing="linspace"), {}),
    **{f"euler {name}": (each, {}) for name, each in EULERS.items()},
    **{f"flow {name}": each for name, each in FLOWS.items()},
    **{name: (each, {}) for name, each in MULTISTEP.items()},
}


def toy(number, sample, timestep):
    """A denoiser: curved, and another one at every timestep."""
    return torch.sin(2 * sample + float(timestep) / 300) + 0.3 * sample


class Held:
    """Predicts in the computed steps alone, and else holds what was predicted: noise and image, or the velocity."""

    def __init__(self, alphas=None):
        self.alphas = alphas
        self.calls = 0

    def __call__(self, number, sample, timestep):
        alpha = None if self.alphas is None else self.alphas[int(timestep)].double()
        if number in COMPUTED:
            self.calls += 1
            self.output = toy(number, sample, timestep)
            if alpha is not None:  # of a velocity
                self.image = alpha.sqrt() * sample - (1 - alpha).sqrt() * self.output
                self.noise = alpha.sqrt() * self.output + (1 - alpha).sqrt() * sample
        elif alpha is not None:
            return alpha.sqrt() * self.noise - (1 - alpha).sqrt() * self.image
        return self.output


class TestItIsTheFullListWithPredictionsHeld:
    @pytest.mark.parametrize("name", DDIMS)
    def test_ddim(self, name):
        scheduler = DDIMS[name]
        is_velocity = scheduler.config.prediction_type == "v_prediction"
        held = Held(scheduler.alphas_cumprod if is_velocity else None)
        expected = solved(scheduler, held, STEPS)
        found = solved(thinned(scheduler, COMPUTED), toy, STEPS)
        assert held.calls == len(COMPUTED)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(found, solved(scheduler, toy, STEPS), atol=1e-3)

    @pytest.mark.parametrize("name", EULERS)
    def test_euler(self, name):
        expected = solved(EULERS[name], Held(), STEPS)
        found = solved(thinned(EULERS[name], COMPUTED), toy, STEPS)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", FLOWS)
    def test_flow(self, name):
        scheduler, arguments = FLOWS[name]
        expected = solved(scheduler, Held(), STEPS, **arguments)
        found = solved(thinned(scheduler, COMPUTED), toy, STEPS, **arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SCHEDULERS)
class TestEveryScheduler:
    def test_with_all_steps_it_is_itself(self, name):
        scheduler, arguments = SCHEDULERS[name]
        plain = solved(scheduler, toy, STEPS, **arguments)
        found = solved(thinned(scheduler, range(STEPS)), toy, STEPS, **arguments)
        assert torch.equal(found, plain)

    def test_it_takes_its_own_timesteps(self, name):
        scheduler, arguments = SCHEDULERS[name]
        thin, full = thinned(scheduler, COMPUTED), copy.deepcopy(scheduler)
        thin.set_timesteps(STEPS, **arguments)
        full.set_timesteps(STEPS, **arguments)
        assert thin.timesteps.tolist() == full.timesteps[list(COMPUTED)].tolist()
        if hasattr(full, "sigmas"):
            assert thin.sigmas.tolist() == [*full.sigmas[list(COMPUTED)].tolist(), full.sigmas[-1].item()]


@pytest.mark.parametrize("make", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
def test_multistep_solvers_see_how_long_a_step_is(make):
    """The data are a Gaussian, so that the solution is known. Steps are of two lengths. With twice as many, a solver of
    order two comes about four times closer only if it knows them."""
    spread = 3.0
    scheduler = make(**BETAS, solver_order=2, use_exponential_sigmas=True)

    def error(steps):
        thin = thinned(scheduler, [step for step in range(steps) if step % 3 != 1])
        thin.set_timesteps(steps)
        levels = thin.sigmas.double()  # timesteps are rounded

        def predict(number, sample, timestep):
            sigma = levels[number]
            return sample * (1 + sigma**2).sqrt() * sigma / (spread**2 + sigma**2)

        exact = noise() * spread * ((1 + levels[0] ** 2) / (spread**2 + levels[0] ** 2)).sqrt()
        return float((solved(thin, predict, steps) - exact).norm() / exact.norm())

    assert error(40) / error(80) > 3


PIPELINES = (sd15_pipeline, sdxl_pipeline, flux_pipeline, sd3_pipeline, pixart_pipeline)


def calls_of(pipe):
    """The timesteps of the denoiser's calls, as they come."""
    found = []

    def note(module, args, kwargs):
        found.append(kwargs.get("timestep", args[1] if len(args) > 1 else None))

    return found, denoiser(pipe).register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.parametrize("pipeline", PIPELINES)
class TestPipelines:
    def test_only_these_steps_are_computed_and_nothing_stays(self, pipeline):
        pipe, shortcut = pipeline(), parse_shortcut("timesteps:computed=(0,1,4)")
        own, config = pipe.scheduler, dict(pipe.config)
        whole = run(pipe, num_inference_steps=8)
        calls, hook = calls_of(pipe)
        with shortcut.applied(pipe, 3):
            found = run(pipe, num_inference_steps=shortcut.requested_steps(8))
        hook.remove()
        assert len(calls) == shortcut.steps_of(8) == 3
        assert torch.isfinite(found).all()
        assert not torch.equal(found, whole)
        with pytest.raises(TypeError), shortcut.applied(pipe, 3):
            run(pipe, num_inference_steps="many")
        assert pipe.scheduler is own
        assert dict(pipe.config) == config
        assert torch.equal(run(pipe, num_inference_steps=8), whole)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("timesteps", "does not say which: write timesteps:computed=\\(0,1,2,4,7\\)"),
            ("timesteps:8", "computed=8 must be a tuple"),
            ("timesteps:computed=0.5", "computed=0.5 must be a tuple"),
            ("timesteps:computed=(1,2)", r"computed=\(1,2\) lacks step 0"),
            ("timesteps:computed=(0,2,1)", r"computed=\(0,2,1\) is not allowed: write each step once"),
            ("timesteps:computed=(0,2.5)", "computed=2.5 is not allowed: it must be a whole number"),
            ("timesteps:steps=(0,1)", "'steps' is not a setting of timesteps"),
        ],
    )
    def test_of_settings_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_shortcut(text)

    def test_steps_beyond_the_run(self):
        with pytest.raises(UsageError, match=r"has step 13, and the steps of this run are 0 to 7"):
            parse_shortcut(TEXT).steps_of(8)

    def test_all_steps(self):
        with pytest.raises(UsageError, match=r"has all 3 steps of the run: leave some out"):
            parse_shortcut("timesteps:computed=(0,1,2)").steps_of(3)

    def test_an_unknown_scheduler(self):
        pipe = sd15_pipeline()
        pipe.scheduler = PNDMScheduler(**BETAS)
        with pytest.raises(UsageError, match="cannot be used with a PNDMScheduler, the scheduler of this Stable"):
            columns_of(pipe, [ColumnSpec.parse(TEXT)], [])

    def test_two_numbers_of_steps(self):
        with pytest.raises(UsageError, match="has several numbers of steps"):
            ColumnSpec.parse(f"steps:4+{TEXT}")
