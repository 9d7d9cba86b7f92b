"""Another solver in place of a pipeline's: it solves the same equation, and leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from diffusers.schedulers import AysSchedules
from gaussian_model import Gaussian
from tiny_clips import FRAMES, SIZE, clip_pipeline
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
from toma_lab.columns.schedulers import other_scheduler
from toma_lab.pipelines.clips import ClipRequest, latents_of

from toma_diffusion import UsageError

ZERO_SNR = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
OWN = {
    "ddim": (DDIMScheduler(**BETAS, clip_sample=False, set_alpha_to_one=False, steps_offset=1), {}),
    "ddim, zero snr": (DDIMScheduler(**BETAS, clip_sample=False, **ZERO_SNR), {}),
    "pndm": (PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1), {}),
    "euler": (EulerDiscreteScheduler(**BETAS, timestep_spacing="leading", steps_offset=1), {}),
    "flow, shift": (FlowMatchEulerDiscreteScheduler(shift=3.0), {}),
    "flow, dynamic shift": (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), {"mu": 0.9}),
    "flow, unipc": (
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        {},
    ),
}
POSSIBLE = {
    "ddim": ("dpmpp-2m own", "unipc own"),
    "ddim, zero snr": ("dpmpp-2m own", "unipc own"),
    "pndm": ("dpmpp-2m own", "unipc own", "dpmpp-2m ays", "unipc ays"),
    "euler": ("dpmpp-2m own", "unipc own", "dpmpp-2m ays", "unipc ays"),
    "flow, shift": ("dpmpp-2m own", "unipc own"),
    "flow, dynamic shift": ("dpmpp-2m own", "unipc own"),
    "flow, unipc": ("dpmpp-2m own",),
}


class StableDiffusionPipeline(SimpleNamespace):
    """A pipeline of that name: more than the name and the scheduler is not looked at."""


class StableDiffusionXLPipeline(SimpleNamespace):
    """The same for SDXL."""


@pytest.mark.parametrize(("own", "other"), [(own, other) for own, others in POSSIBLE.items() for other in others])
def test_every_solver_comes_to_the_same(own, other):
    """Noise, prediction and shift were taken over, or it would come to something else."""
    scheduler, arguments = OWN[own]
    name, spacing = other.split()
    made = other_scheduler("", StableDiffusionPipeline(scheduler=scheduler), name, spacing)
    model = Gaussian(scheduler)
    few, many = model.error(made, 10, **arguments), model.error(made, 300, **arguments)
    assert many < 0.012
    assert many < few / 4
    assert few < model.error(scheduler, 10, **arguments) or own in ("pndm", "flow, unipc")


class TestAlignYourSteps:
    @pytest.mark.parametrize(
        ("pipeline", "key"),
        [(StableDiffusionPipeline, "StableDiffusionSigmas"), (StableDiffusionXLPipeline, "StableDiffusionXLSigmas")],
    )
    def test_ten_steps_are_those_published(self, pipeline, key):
        pipe = pipeline(scheduler=OWN["euler"][0])
        made = other_scheduler("", pipe, "dpmpp-2m", "ays")
        made.set_timesteps(10)
        assert made.sigmas.tolist() == pytest.approx(AysSchedules[key], rel=1e-5)
        published = AysSchedules[key.replace("Sigmas", "Timesteps")]
        assert made.timesteps.tolist() == pytest.approx(published, abs=3.5)

    def test_other_numbers_are_on_lines_between_logarithms(self):
        made = other_scheduler("", StableDiffusionPipeline(scheduler=OWN["euler"][0]), "unipc", "ays")
        made.set_timesteps(20)
        levels, published = made.sigmas.tolist(), AysSchedules["StableDiffusionSigmas"]
        assert levels[:-2:2] == pytest.approx(published[:-1], rel=1e-5)
        assert levels[1] == pytest.approx((published[0] * published[1]) ** 0.5, rel=1e-5)
        assert levels[-2] == pytest.approx((published[-2] * 0.0292) ** 0.5, rel=1e-2)
        assert levels[-1] == 0


PIPELINES = {
    sd15_pipeline: ("solver:name=dpmpp-2m;steps=4", "solver:name=unipc;steps=4;spacing=ays"),
    sdxl_pipeline: ("solver:name=unipc;steps=4", "solver:name=dpmpp-2m;steps=6;computed=(0,1,2,4)"),
    flux_pipeline: ("solver:name=dpmpp-2m;steps=4", "solver:name=unipc;steps=6;computed=(0,1,2,4)"),
    sd3_pipeline: ("solver:name=unipc;steps=4",),
    pixart_pipeline: ("solver:name=unipc;steps=4",),
}


@pytest.mark.parametrize(("pipeline", "text"), [(pipe, text) for pipe, texts in PIPELINES.items() for text in texts])
def test_pipelines(pipeline, text):
    pipe, shortcut = pipeline(), parse_shortcut(text)
    shortcut.check_on(pipe)
    own, config = pipe.scheduler, dict(pipe.config)
    whole, calls = run(pipe, num_inference_steps=8), []
    hook = denoiser(pipe).register_forward_pre_hook(lambda module, args: calls.append(1))
    with shortcut.applied(pipe, 4):
        found = run(pipe, num_inference_steps=shortcut.requested_steps(8))
    hook.remove()
    assert len(calls) == shortcut.steps_of(8) == 4
    assert torch.isfinite(found).all()
    assert not torch.allclose(found, run(pipe, num_inference_steps=4), rtol=1e-3, atol=1e-3)
    with pytest.raises(TypeError), shortcut.applied(pipe, 4):
        run(pipe, num_inference_steps="many")
    assert pipe.scheduler is own
    assert dict(pipe.config) == config
    assert torch.equal(run(pipe, num_inference_steps=8), whole)


@pytest.mark.parametrize("kind", ["text", "two"])
def test_clips(kind):
    pipe, shortcut = clip_pipeline(kind), parse_shortcut("solver:name=dpmpp-2m;steps=4")
    request = ClipRequest("a red apple", steps=4, width=SIZE[0], height=SIZE[1], frames=FRAMES)
    whole = latents_of(pipe, request)
    with shortcut.applied(pipe, 4):
        found = latents_of(pipe, request)
    assert torch.isfinite(found).all()
    assert not torch.equal(found, whole)
    assert torch.equal(latents_of(pipe, request), whole)


def test_together_with_merging():
    pipe = sdxl_pipeline()
    alone = run(pipe, num_inference_steps=8)
    spec = ColumnSpec.parse("toma-stage:skip_blocks=()+solver:name=dpmpp-2m;steps=4")
    (column,) = columns_of(pipe, [spec], [0.5])
    with column.applied(pipe, 8):
        both = run(pipe, num_inference_steps=column.requested_steps(8))
    assert torch.isfinite(both).all()
    assert torch.equal(run(pipe, num_inference_steps=8), alone)


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("solver", "needs a name, such as solver:name=dpmpp-2m;steps=8: use one of 'dpmpp-2m'"),
            ("solver:name=heun", "name='heun' is not known: use one of 'dpmpp-2m'"),
            ("solver:name=unipc;spacing=even", "spacing='even' is not known: use one of 'own', 'ays'"),
            ("solver:name=unipc;steps=few", "steps='few' is not allowed"),
            ("solver:name=unipc;computed=(1,2)", r"computed=\(1,2\) lacks step 0"),
            ("solver:name=unipc;stages=2", "'stages' is not a setting of solver"),
        ],
    )
    def test_of_settings_are_named(self, text, message):
        with pytest.raises(UsageError, match=message):
            parse_shortcut(text)

    def test_more_steps_than_the_run(self):
        with pytest.raises(UsageError, match="has more than the 8 steps of the run"):
            parse_shortcut("solver:name=unipc;steps=9").steps_of(8)

    def test_a_step_beyond_its_own(self):
        with pytest.raises(UsageError, match="has step 6, and the steps of this run are 0 to 5"):
            parse_shortcut("solver:name=unipc;steps=6;computed=(0,6)").steps_of(8)

    @pytest.mark.parametrize(
        ("text", "pipeline", "message"),
        [
            ("solver:name=dpmpp-2m", pixart_pipeline, "is what this PixArtAlphaPipeline does already"),
            ("solver:name=unipc;spacing=ays", flux_pipeline, "cannot be used with a flow model: Align Your Steps"),
            ("solver:name=unipc;spacing=ays", pixart_pipeline, "cannot be used with this PixArtAlphaPipeline: Align"),
        ],
    )
    def test_of_the_pipeline(self, text, pipeline, message):
        with pytest.raises(UsageError, match=message):
            columns_of(pipeline(), [ColumnSpec.parse(text)], [])

    @pytest.mark.parametrize(
        ("scheduler", "text", "message"),
        [
            (LCMScheduler(**BETAS), "solver:name=unipc", "cannot be used with a LCMScheduler"),
            (OWN["ddim, zero snr"][0], "solver:name=unipc;spacing=ays", "are published for Stable Diffusion 1.5"),
            (DDIMScheduler(**BETAS), "solver:name=unipc", "clip_sample=True: UniPCMultistepScheduler cannot clip"),
            (
                FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
                "solver:name=unipc",
                "that has invert_sigmas=True: other solvers do not know it",
            ),
        ],
    )
    def test_of_the_scheduler(self, scheduler, text, message):
        with pytest.raises(UsageError, match=message):
            parse_shortcut(text).check_pipeline(StableDiffusionPipeline(scheduler=scheduler))


def test_titles():
    titles = [parse_shortcut(f"solver:name=unipc{more}").title for more in ("", ";steps=8;spacing=ays")]
    assert titles == ["unipc", "unipc, 8 steps, ays"]
    assert parse_shortcut("solver:name=unipc;steps=8;computed=(0,2)").point == "2"
