"""Which step a call belongs to, read from real pipelines and schedulers, or told; what plans do in which step."""

import gc
import sys
import warnings
from collections import Counter
from itertools import cycle

import diffusers
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    UniPCMultistepScheduler,
)
from diffusers.callbacks import SDCFGCutoffCallback
from diffusers.utils import is_scipy_available, is_torchsde_available
from merging import ONE_PLAN, merged, steady
from observe import same_picture
from pairs import in_turn, named, pairwise
from tiny import ALL, SCOPES, one, output_of, sd15_unet, with_sample
from tiny_pipelines import (
    PIPELINES,
    embeds,
    flux_pipeline,
    img2img,
    picture,
    quiet,
    run,
    sd3_pipeline,
    sd15_pipeline,
    sdxl_pipeline,
)
from tracing import SELECTS, WEIGHS, Trace, traced

from toma_diffusion.merge import Action, Schedule

TENTH = ONE_PLAN | {"select_every": 10, "reweigh_every": 5}
"""As in the paper."""
OFTEN = {"select_every": 3, "reweigh_every": 2}
"""So that a short generation has every action."""
LATE = {"window": (0.5, 1.0)}
IMAGE_TO_IMAGE = {
    "sdxl": (sdxl_pipeline, StableDiffusionXLImg2ImgPipeline),
    "flux": (flux_pipeline, FluxImg2ImgPipeline),
}


def half(count: int) -> list[bool]:
    return [False] * (count // 2) + [True] * (count - count // 2)


class TestCounts:
    """Five selections and ten computations of weights a plan, in fifty steps."""

    @pytest.mark.parametrize("name", ["sdxl", "flux"])
    def test_fifty_steps(self, name):
        pipe = PIPELINES[name]()
        merged(pipe, **TENTH)
        trace = traced(pipe, num_inference_steps=50)
        assert len(trace.calls) == 50
        assert trace.where(SELECTS) == [0, 10, 20, 30, 40]
        assert trace.where(WEIGHS) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
        assert trace.total(SELECTS) == 5 * one(name).kinds
        assert trace.total(WEIGHS) == 10 * one(name).kinds
        assert trace.where("merge") == trace.where("unmerge") == list(range(50))


@pytest.mark.parametrize(("family", "scope", "passes"), in_turn(ALL, SCOPES, (1, 2)), ids=named)
def test_two_generations_of_a_bare_model_follow_the_schedule(family, scope, passes):
    """A loop over the denoiser, one or two calls a step; a new prompt begins a new generation. The second call of a
    step uses the plans of the first: it has the same sample."""
    model = family.build()
    merged(model, select_every=4, reweigh_every=2, scope=scope, share_plan=True)
    for generation in range(2):
        prompts = [family.inputs(seed=10 * generation + index) for index in range(passes)]
        with Trace(model) as trace:
            for _ in range(5):
                latent = with_sample(prompts[0], torch.randn_like)
                for prompt in prompts:
                    name = next(name for name in ("sample", "hidden_states", "x") if name in latent)
                    output_of(model, prompt | {name: latent[name]})
        assert trace.total(SELECTS) == 2 * family.kinds  # in steps 0 and 4
        assert trace.total(WEIGHS) == 3 * family.kinds  # and in 2


def schedulers() -> list:
    """All that the Stable Diffusion pipelines name as compatible, and the distilled models' own."""
    names = {kind.__name__ for kind in sd15_pipeline().scheduler.compatibles}
    return sorted(names | {"LCMScheduler", "TCDScheduler", "DDIMParallelScheduler", "DDPMParallelScheduler"})


FLOWS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


class TestSchedulers:
    # With guidance and without by turns: it changes the batch, not the number of calls.
    @pytest.mark.parametrize(("name", "guidance"), list(zip(schedulers(), cycle([7.5, 0.0]), strict=False)))
    def test_stable_diffusion(self, name, guidance):
        if name == "DPMSolverSDEScheduler" and not is_torchsde_available():
            pytest.skip("DPMSolverSDEScheduler needs torchsde")
        if name == "LMSDiscreteScheduler" and not is_scipy_available():
            pytest.skip("LMSDiscreteScheduler needs scipy")
        pipe = sd15_pipeline()
        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
        self.check(pipe, 2, num_inference_steps=7, guidance_scale=guidance)

    @pytest.mark.parametrize(
        "scheduler",
        [
            FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
            FlowMatchHeunDiscreteScheduler(),
            FlowMatchLCMScheduler(),
            DPMSolverMultistepScheduler(**FLOWS),
            UniPCMultistepScheduler(**FLOWS),
        ],
        ids=lambda scheduler: type(scheduler).__name__,
    )
    def test_flows(self, scheduler):
        pipe = sd3_pipeline()
        pipe.scheduler = scheduler
        self.check(pipe, 1, num_inference_steps=7)

    @pytest.mark.parametrize("true_cfg_scale", [1.0, 2.0])
    @pytest.mark.parametrize("scheduler", [FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler], ids=named)
    def test_flux(self, scheduler, true_cfg_scale):
        pipe = flux_pipeline()
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        passes = 2 if true_cfg_scale > 1 else 1
        self.check(pipe, 2, passes, num_inference_steps=7, true_cfg_scale=true_cfg_scale)

    def check(self, pipe, kinds, passes=1, **arguments):
        """As often as the schedule says for the calls that were made; afresh in every generation."""
        merged(pipe, **ONE_PLAN, **OFTEN)
        schedule = Schedule(**OFTEN)
        for _ in range(2):
            with Trace(pipe) as trace:
                assert run(pipe, **arguments).isfinite().all()
            steps, rest = divmod(len(trace.calls), passes)
            assert rest == 0
            assert steps == len(pipe.scheduler.timesteps)
            actions = Counter(schedule.action(step, steps) for step in range(steps))
            assert trace.total(SELECTS) == actions[Action.SELECT] * kinds * passes
            assert trace.total(WEIGHS) == (actions[Action.SELECT] + actions[Action.REWEIGH]) * kinds * passes
            assert trace.where("merge") == list(range(len(trace.calls)))


class TestPasses:
    def test_skip_layer_guidance_is_another_pass_over_the_step(self):
        pipe = sd3_pipeline()
        merged(pipe, **TENTH)
        layers = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
        for _ in range(2):
            trace = traced(pipe, num_inference_steps=12, **layers)
            # Step 0 makes one call; the others two, of which the second skips a layer and sees the picture once.
            assert len(trace.calls) == 23
            # The batched pass selects in steps 0 and 10, the skipping one in its first, 1, and in 10.
            assert trace.where(SELECTS) == [0, 2, 19, 20]
            assert trace.where(WEIGHS) == [0, 2, 9, 10, 19, 20]

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            (
                "sd3",
                {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0},
            ),
            ("sd15", {"callback_on_step_end": SDCFGCutoffCallback(0.4)}),
        ],
        ids=["pass", "batch"],
    )
    def test_what_begins_late_forgets_the_last_generation(self, name, arguments):
        """A pass, or a size of the batch, that step 0 does not have: its plan must be made anew nevertheless."""
        pipe = PIPELINES[name]()
        arguments = {"num_inference_steps": 8, **arguments}
        with steady(pipe, **TENTH):
            run(pipe, seed=1, **arguments)
            second = run(pipe, **arguments)
        with steady(pipe, **TENTH):
            same_picture(run(pipe, **arguments), second)

    def test_guidance_cut_off_half_way(self):
        """The batch halves within a generation; steps go on being counted."""
        pipe = sd15_pipeline()
        handle = merged(pipe, **TENTH)
        trace = traced(pipe, num_inference_steps=20, callback_on_step_end=SDCFGCutoffCallback(0.2))
        assert trace.steps == [(step, 0) for step in range(20)]
        assert trace.where(SELECTS) == [0, 5, 10]  # in step 5 because the batch is another
        handle.remove()
        merged(pipe, **LATE)
        trace = traced(pipe, num_inference_steps=20, callback_on_step_end=SDCFGCutoffCallback(0.2))
        assert trace.merged == half(20)

    @pytest.mark.parametrize("name", PIPELINES)
    def test_one_step(self, name):
        pipe = PIPELINES[name]()
        if name == "pixart":  # its pipeline takes a single step only from a scheduler of distilled models
            pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
        plain = run(pipe, num_inference_steps=1)
        with merged(pipe, **TENTH):
            for _ in range(3):
                trace = traced(pipe, num_inference_steps=1)
                assert trace.total(SELECTS) == trace.total(WEIGHS) == one(name).kinds * len(trace.calls)
        with steady(pipe):
            first, second = (run(pipe, num_inference_steps=1) for _ in range(2))
        same_picture(first, second)
        assert not torch.equal(first, plain)

    @pytest.mark.parametrize(("name", "keep"), pairwise(["sd15", "flux"], [True, False]))
    def test_a_callback_that_returns_new_prompt_embeddings(self, name, keep):
        """From Python 3.13 on nothing keeps the old embeddings alive; before it, the frame's `locals()` do."""
        pipe = PIPELINES[name]()
        merged(pipe, **LATE)
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

        arguments = {"callback_on_step_end": renew, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
        trace = traced(pipe, num_inference_steps=8, **arguments)
        assert trace.merged == half(8)
        assert trace.steps == [(step, 0) for step in range(8)]


class TestWindow:
    WINDOW = TENTH | {"window": (0.4, 1.0)}

    @pytest.mark.parametrize("name", PIPELINES)
    def test_last_six_of_ten_steps(self, name):
        pipe = PIPELINES[name]()
        merged(pipe, **self.WINDOW)
        for _ in range(2):
            trace = traced(pipe, num_inference_steps=10)
            assert trace.where("merge") == trace.where("unmerge") == list(range(4, 10))
            assert trace.where(SELECTS) == [4]
            assert trace.where(WEIGHS) == [4, 9]

    @pytest.mark.filterwarnings("ignore:a generation of")
    def test_number_of_steps_may_change(self):
        pipe = sd15_pipeline()
        merged(pipe, **self.WINDOW)
        for steps, first in ((10, 4), (5, 2), (20, 8), (1, 1), (10, 4)):
            assert traced(pipe, num_inference_steps=steps).where("merge") == list(range(first, steps))

    def test_a_scheduler_of_two_calls_a_step(self):
        pipe = sd15_pipeline()
        pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
        merged(pipe, **self.WINDOW)
        trace = traced(pipe, num_inference_steps=10)
        assert len(trace.calls) == 19
        assert trace.where("merge") == list(range(8, 19))

    @pytest.mark.parametrize("name", IMAGE_TO_IMAGE)
    def test_image_to_image_counts_the_steps_really_made(self, name):
        """Also after a text-to-image run over the same components."""
        make, pipeline_class = IMAGE_TO_IMAGE[name]
        text_to_image = make()
        pipe = img2img(text_to_image, pipeline_class)
        merged(text_to_image, **self.WINDOW)
        for steps, strength, made, first in ((20, 0.5, 10, 4), (10, 0.5, 5, 2), (10, 1.0, 10, 4)):
            trace = traced(pipe, image=picture(), num_inference_steps=steps, strength=strength)
            assert len(trace.calls) == made
            assert trace.where("merge") == list(range(first, made))
            assert traced(text_to_image, num_inference_steps=10).where("merge") == list(range(4, 10))

    def test_base_and_refiner(self):
        base = sdxl_pipeline()
        refiner = img2img(sdxl_pipeline(), StableDiffusionXLImg2ImgPipeline)
        for pipe in (base, refiner):
            merged(pipe, **self.WINDOW)
        trace = traced(base, num_inference_steps=20, denoising_end=0.75)
        assert trace.where("merge") == list(range(6, len(trace.calls)))
        latents = run(base, num_inference_steps=20, denoising_end=0.75)
        trace = traced(refiner, image=latents, num_inference_steps=20, denoising_start=0.75)
        assert len(trace.calls) == 5
        assert trace.where("merge") == [2, 3, 4]

    def test_one_that_never_opens_warns_once_with_the_reason(self):
        pipe = sd15_pipeline()
        merged(pipe, **LATE)
        with pytest.warns(UserWarning, match=r"generation of 1 step was not made.* with window=\(0\.5, 1\.0\)"):
            run(pipe, num_inference_steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(pipe, num_inference_steps=1)

    def test_steps_that_were_counted_wrong(self):
        """Nothing tells where a loop stands that hands the model copies of its timesteps: half of it is missing."""
        pipe = sd15_pipeline()
        merged(pipe, **LATE)
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
        handle = merged(pipe, window=settings.get("window", (0.5, 1.0)))
        handle.enabled = settings.get("enabled", True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                run(pipe, num_inference_steps=settings.get("num_inference_steps", 1))


class TestSharedDenoiser:
    """Merging is applied to one pipeline, its parts are used by another."""

    @pytest.mark.parametrize("own_scheduler", [True, False])
    def test_generations_by_turns(self, own_scheduler):
        def pair():
            first = sd15_pipeline()
            parts = dict(first.components)
            if own_scheduler:
                parts["scheduler"] = HeunDiscreteScheduler.from_config(first.scheduler.config)
            return first, quiet(StableDiffusionPipeline(**parts, requires_safety_checker=False))

        pipes, fresh = pair(), {}
        for which, seed in {(0, 0), (1, 0), (1, 1), (0, 2)}:
            others = pair()
            steady(others[0], **OFTEN)
            fresh[which, seed] = run(others[which], seed=seed)
        plain = run(pipes[1], seed=0)
        handle = steady(pipes[0], **OFTEN)
        for which, seed in [(0, 0), (1, 0), (1, 1), (0, 2), (0, 2), (1, 0)]:
            same_picture(run(pipes[which], seed=seed), fresh[which, seed])
        handle.remove()
        assert torch.equal(run(pipes[1], seed=0), plain)


class TestLoopsOfOnesOwn:
    """A denoiser without any pipeline, or over the parts of one."""

    def calls(self, unet, number, text=None, sample=None) -> Trace:
        text = torch.randn(1, 7, 32) if text is None else text
        with Trace(unet) as trace, torch.no_grad():
            for _ in range(number):
                unet(torch.randn(1, 4, 16, 16) if sample is None else sample, 10, text)
        return trace

    def test_every_call_is_a_step_and_new_conditioning_begins_a_new_generation(self):
        unet = sd15_unet()
        merged(unet, **TENTH)
        for number in (25, 3, 12):
            assert self.calls(unet, number).where(SELECTS) == list(range(0, number, 10))
        assert self.calls(unet, 12, sample=torch.randn(1, 4, 16, 16)).where(SELECTS) == [0, 10]

    def test_the_same_conditioning_goes_on_until_reset(self):
        unet = sd15_unet()
        handle = merged(unet, **TENTH)
        text = torch.randn(1, 7, 32)
        assert self.calls(unet, 4, text).where(SELECTS) == [0]
        assert self.calls(unet, 8, text).where(SELECTS) == [6]
        handle.reset()
        assert self.calls(unet, 12, text).where(SELECTS) == [0, 10]

    def loop(self, pipe, seed: int = 0, tiles: int = 1, rebuilt: bool = False) -> None:
        prompt = embeds(pipe)["prompt_embeds"]
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        for t in pipe.scheduler.timesteps:
            conditioning = prompt.clone() if rebuilt else prompt
            noise = [pipe.unet(latents.clone(), t, conditioning).sample for _ in range(tiles)]
            latents = pipe.scheduler.step(noise[0], t, latents).prev_sample

    def test_over_a_pipelines_scheduler(self):
        """With conditioning rebuilt in every step; and two seeds after one `set_timesteps`."""
        pipe = sd15_pipeline()
        merged(pipe, **LATE)
        pipe.scheduler.set_timesteps(6)
        for rebuilt in (True, False):
            with Trace(pipe) as trace, torch.no_grad():
                for seed in range(2):
                    self.loop(pipe, seed, rebuilt=rebuilt)
            assert trace.merged == half(6) * 2
            assert trace.steps == [(step, 0) for step in range(6)] * 2

    def test_more_than_64_tiles_of_a_picture_in_a_step(self):
        pipe = sd15_pipeline()
        merged(pipe, **LATE)
        pipe.scheduler.set_timesteps(2)
        with Trace(pipe) as trace, torch.no_grad():
            self.loop(pipe, tiles=66)
        assert trace.steps == [(step, tile) for step in range(2) for tile in range(66)]
        assert trace.merged == [active for active in half(2) for _ in range(66)]

    def test_told(self):
        unet = sd15_unet()
        handle = merged(unet, **LATE)
        with pytest.raises(RuntimeError, match=r"window=\(0\.5, 1\.0\) needs the number of steps.*handle\.begin"):
            self.calls(unet, 1)
        for _ in range(2):
            handle.begin(6)
            found = []
            for step in range(6):
                handle.step(step)
                found += self.calls(unet, 1).merged
            assert found == half(6)
        handle.begin(6)
        assert self.calls(unet, 6).merged == half(6)  # every call is a step


class TestFailures:
    @pytest.mark.parametrize(("name", "scope"), in_turn(["sd15", "flux", "sd3"], SCOPES))
    def test_an_exception_between_two_steps(self, name, scope):
        pipe = PIPELINES[name]()
        steady(pipe, **TENTH, scope=scope)
        whole, other = (run(pipe, num_inference_steps=6, seed=seed) for seed in range(2))

        def fail(pipe, step, timestep, arguments):
            if step == 2:
                raise KeyboardInterrupt
            return arguments

        for seed, expected in ((0, other), (1, whole)):
            with pytest.raises(KeyboardInterrupt):
                run(pipe, num_inference_steps=6, seed=seed, callback_on_step_end=fail)
            same_picture(run(pipe, num_inference_steps=6, seed=1 - seed), expected)

    def test_switched_off_and_on_within_a_generation(self):
        pipe = sd15_pipeline()
        handle = merged(pipe, **TENTH)

        def switch(pipe, step, timestep, arguments):
            handle.enabled = not 2 <= step < 5
            return arguments

        for _ in range(2):
            trace = traced(pipe, num_inference_steps=9, callback_on_step_end=switch)
            assert trace.where("merge") == [0, 1, 2, 6, 7, 8]
            assert trace.where(SELECTS) == [0, 6]
